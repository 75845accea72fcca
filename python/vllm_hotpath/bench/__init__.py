"""What ``verify`` and ``bench`` are made of: model shapes, references, timing, floors, peers, result pages.

The installed commands and the scripts in ``benchmarks/`` share it. What it knows of one op is in
``bench/ops/<stem>.py``.
"""
