"""Tests of vllm-hotpath."""
