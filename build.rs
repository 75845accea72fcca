//! Compiles every `kernels/*.cu` to a fatbin and writes the table of them that `src/cuda/module.rs` embeds.
//!
//! nvcc is the one of the PyPI package `nvidia-cuda-nvcc` of the building Python, else of `CUDA_HOME`, else of `PATH`.

use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

/// Machine code in the wheel. `f` targets serve their family: `sm_100f` also runs on 10.3, `sm_120f` on 12.1.
const TARGETS: [&str; 3] = ["90a", "100f", "120f"];
const FLAGS: [&str; 6] =
    ["-fatbin", "-std=c++17", "-O3", "--compress-mode=size", "-Xptxas=-warn-spills", "-Werror=all-warnings"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=kernels");
    for variable in ["PYO3_PYTHON", "PYTHON_SYS_EXECUTABLE", "CUDA_HOME", "PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }

    let kernels = Path::new("kernels");
    let mut sources = files_with_extension(kernels, "cu");
    sources.sort();
    let mut headers = files_with_extension(kernels, "cuh");
    headers.sort();
    let nvcc = find_nvcc();
    let version = nvcc_version(&nvcc);
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));

    let next = AtomicUsize::new(0);
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1).min(sources.len()).max(1);
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                    compile(&nvcc, &version, source, &headers, &out);
                }
            });
        }
    });

    let mut table = format!("pub static FATBINS: [Fatbin; {}] = [\n", sources.len());
    for source in &sources {
        let stem = stem(source);
        let bytes = format!("include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{stem}.fatbin\"))");
        writeln!(
            table,
            "    {{ static CODE: &Aligned<[u8]> = &Aligned(*{bytes}); Fatbin::new({stem:?}, &CODE.0) }},"
        )
        .expect("writing to a String cannot fail");
    }
    let targets: Vec<String> = TARGETS.iter().map(|t| format!("sm_{t}")).collect();
    writeln!(table, "];\npub static TARGETS: &[&str] = &{targets:?};\npub static NVCC: &str = {version:?};")
        .expect("writing to a String cannot fail");
    fs::write(out.join("fatbins.rs"), table).expect("OUT_DIR is writable");
}

fn fail(message: &str) -> ! {
    for line in message.lines() {
        println!("cargo::error={line}");
    }
    exit(1)
}

fn files_with_extension(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries =
        fs::read_dir(folder).unwrap_or_else(|e| fail(&format!("cannot read {}: {e}", folder.display())));
    let paths = entries.filter_map(|entry| entry.ok().map(|e| e.path()));
    paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect()
}

fn stem(source: &Path) -> &str {
    source.file_stem().and_then(|s| s.to_str()).unwrap_or_else(|| fail("kernel file names are ASCII"))
}

/// The first nvcc of: the building Python's site-packages, `CUDA_HOME`, `PATH`.
fn find_nvcc() -> PathBuf {
    let python = env::var("PYO3_PYTHON")
        .or_else(|_| env::var("PYTHON_SYS_EXECUTABLE"))
        .unwrap_or_else(|_| "python3".into());
    let listing = Command::new(&python)
        .args(["-c", "import nvidia\nfor folder in nvidia.__path__: print(folder)"])
        .output();
    let mut candidates = Vec::new();
    if let Ok(output) = listing {
        let folders = String::from_utf8_lossy(&output.stdout).into_owned();
        candidates.extend(folders.lines().map(|folder| Path::new(folder).join("cu13/bin/nvcc")));
    }
    if let Some(home) = env::var_os("CUDA_HOME") {
        candidates.push(Path::new(&home).join("bin/nvcc"));
    }
    if let Some(path) = env::var_os("PATH") {
        candidates.extend(env::split_paths(&path).map(|folder| folder.join("nvcc")));
    }
    candidates.into_iter().find(|nvcc| nvcc.is_file()).unwrap_or_else(|| {
        fail(&format!(
            "no nvcc found. Looked for, in this order: \
             (1) the PyPI packages nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt, nvidia-cuda-runtime and nvidia-cuda-cccl \
             (13.0) in the Python that builds ({python}); (2) CUDA_HOME/bin/nvcc; (3) nvcc on PATH.\n\
             `pip install .` installs (1) by itself; plain cargo needs PYO3_PYTHON set to a Python that has them."
        ))
    })
}

fn nvcc_version(nvcc: &Path) -> String {
    let output = Command::new(nvcc)
        .arg("--version")
        .output()
        .unwrap_or_else(|e| fail(&format!("{} cannot be run: {e}", nvcc.display())));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version =
        text.split_once(", V").map(|(_, rest)| rest.split_whitespace().next().unwrap_or_default().to_owned());
    let version = version.unwrap_or_else(|| fail(&format!("{} --version says: {text}", nvcc.display())));
    let major: u32 = version.split('.').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    if major < 13 {
        fail(&format!("{} is CUDA {version}; the kernels need 13.0 or newer", nvcc.display()));
    }
    version
}

/// Compiles one file unless an earlier run compiled the same text with the same compiler and flags.
fn compile(nvcc: &Path, version: &str, source: &Path, headers: &[PathBuf], out: &Path) {
    let stem = stem(source);
    let mut hasher = DefaultHasher::new();
    (version, TARGETS, FLAGS).hash(&mut hasher);
    for file in headers.iter().chain([&source.to_path_buf()]) {
        fs::read(file)
            .unwrap_or_else(|e| fail(&format!("cannot read {}: {e}", file.display())))
            .hash(&mut hasher);
    }
    let key = format!("{:016x}", hasher.finish());
    let (fatbin, stamp) = (out.join(format!("{stem}.fatbin")), out.join(format!("{stem}.key")));
    if fatbin.is_file() && fs::read_to_string(&stamp).is_ok_and(|old| old == key) {
        return;
    }
    let mut command = Command::new(nvcc);
    command.args(FLAGS).arg("--threads=0").arg("-Ikernels").arg(source).arg("-o").arg(&fatbin);
    for target in TARGETS {
        command.arg(format!("-gencode=arch=compute_{target},code=sm_{target}"));
    }
    let output = command.output().unwrap_or_else(|e| fail(&format!("{} cannot be run: {e}", nvcc.display())));
    if !output.status.success() {
        fail(&format!(
            "nvcc failed on {}:\n{}{}",
            source.display(),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    fs::write(stamp, key).expect("OUT_DIR is writable");
}
