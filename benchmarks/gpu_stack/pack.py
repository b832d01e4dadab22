"""Pack the stack that `pip install ".[gpu]"` gives into parts for a GPU host that reaches no package index.

    python benchmarks/gpu_stack/pack.py --work FOLDER --out FOLDER [--part-mib 55] [--keep 90]

and on the host, once all parts lie in /tmp/parts:

    sh benchmarks/gpu_stack/unpack.sh /tmp/parts /tmp/stack; . /tmp/stack/env.sh

From package names alone: downloads the wheels of WHEELS for Python 3.12, installs them into a folder, zeroes the
machine code of other GPUs than --keep (a compute capability), so that it compresses to nothing, strips symbols, deletes
files that no server reads, and writes one xz stream in parts. Prints the versions; `versions.txt` has them, too.

CUDA's own libraries are not packed, except NCCL: `unpack.sh` links the host's.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 26, 24, 18, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
TARGET = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
TARGET += [word for platform in PLATFORMS for word in ("--platform", platform)]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
# What sglang 0.5.23 pins, and what of its other dependencies serving DeepSeek-V4 imports; the rest (diffusion, audio,
# other models' parsers) is left out. The host brings numpy, aiohttp, requests and the like.
WHEELS = (
    *("torch==2.14.1", "triton==3.8.0", "torchvision==0.29.1", "nvidia-nccl-cu13==2.30.7"),
    *("sglang==0.5.23", "sglang-kernel==0.4.10", "sgl-deep-gemm==0.2.3.post2", "sgl-flash-mla==1.0.0"),
    *("flashinfer-python==0.7.2", "tilelang==0.1.12", "apache-tvm-ffi==0.1.11", "transformers==5.19.0"),
    *("nvidia-cutlass-dsl==4.8.0", "nvidia-cutlass-dsl-libs-base==4.8.0", "nvidia-cutlass-dsl-libs-core==4.8.0"),
    *("nvidia-cutlass-dsl-libs-cu13==4.8.0", "deepseek-recipe==0.2.0", "tokenizers==0.23.2", "xgrammar==0.2.7"),
    *("annotated-types==0.8.0", "cffi==2.1.1", "compressed-tensors==0.18.0", "cuda-python==13.4.4", "datasets==5.2.0"),
    *("dill==0.4.1", "distro==1.9.0", "fastapi==0.165.0", "gguf==0.19.0", "httpcore2==2.16.2", "httpx2==2.16.2"),
    *("interegular==0.3.3", "jiter==0.19.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1"),
    *("loguru==0.7.3", "msgspec==0.22.0", "multiprocess==0.70.19", "openai==2.8.0", "opentelemetry-api==1.45.2"),
    *("orjson==3.13.0", "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pycparser==3.12"),
    *("pydantic==2.14.3", "pydantic-core==2.50.4", "pydantic-extra-types==2.11.1", "python-multipart==0.0.34"),
    *("pyzmq==27.3.0", "referencing==0.37.0", "rpds-py==2026.9.1", "setproctitle==1.3.8", "sniffio==1.3.1"),
    *("starlette==1.10.0", "tomlkit==0.15.2", "torch-c-dlpack-ext==0.1.5", "torch-memory-saver==0.0.10"),
    *("truststore==0.10.5", "typing-inspection==0.4.5", "uvicorn==0.54.0", "watchfiles==1.3.0"),
    *("z3-solver==4.15.4.0", "xxhash==4.1.0", "ipython==9.18.1", "traitlets==5.16.1", "soundfile==0.13.1"),
    *("openai-harmony==0.0.4", "humming-kernels==0.1.12", "nvidia-ml-py==13.615.71", "tabulate==0.10.0"),
)
# Globs, from the folder of the unpacked wheels: headers' sources of other GPUs, static libraries, test suites, and
# extensions that serving this model does not load.
UNUSED = (
    *("**/*.a", "**/*.pyi", "**/__pycache__", "*.data", "share", "bin", "include", "torch/bin/protoc*", "functorch"),
    *("torchgen/packaged/autograd", "triton/backends/amd/lib"),
    *("triton/backends/nvidia/lib/cupti*", "triton/_C/libproton.so", "triton/instrumentation"),
    *("sglang/multimodal_gen", "sglang/test", "sglang/srt/rust_extensions/_server*.so", "z3/lib/libz3.so.*"),
    *("sgl_kernel/sm100", "sgl_kernel/infllm_ops*", "sgl_kernel/flash_ops*"),
    *("flashinfer/data/csrc/*sm100*", "flashinfer/data/csrc/*sm12*", "flashinfer/data/csrc/blackwell*"),
    *("flashinfer/data/csrc/fmha_v2*", "flashinfer/data/cutlass/tools/library"),
    *("tilelang/3rdparty/composable_kernel", "nvidia_cutlass_dsl/dsl_packages/iket/profiler"),
)
# Globs that must find something after UNUSED is gone: parts that look unused, without which torch or triton does not
# import.
NEEDED = (
    *("torch/bin/torch_shm_manager", "torch/testing/_internal/distributed/*.py", "triton/backends/amd/*.py"),
    *("nvidia_cutlass_dsl/dsl_packages/cutlass", "z3/lib/libz3.so", "nvidia/nccl/lib/libnccl.so.2"),
)
FAT_BINARY_MAGIC = 0xBA55ED50
STRIP_FROM_BYTES = 500_000


def download(work: Path) -> list[Path]:
    """The wheels, each downloaded once.

    Raises:
        subprocess.CalledProcessError: pip found no such wheel, or reaches no index; its reason is above.
    """
    folder = work / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [wheel for wheel in WHEELS if not any(folder.glob(file_pattern(wheel)))]
    if missing:
        subprocess.run([*PIP, "download", *TARGET, "--dest", str(folder), *missing], check=True)
    return [next(folder.glob(file_pattern(wheel))) for wheel in WHEELS]


def file_pattern(requirement: str) -> str:
    """A glob for the file name of `name==version`."""
    name, version = requirement.split("==")
    return f"{re.sub(r'[-_.]+', '_', name)}-{version}-*.whl"


def zero_foreign_cubins(library: Path, keep: int) -> int:
    """Overwrite with zeros the entries of a library's fat binaries that are for another GPU; the bytes zeroed.

    A fat binary is a header (magic, version, header size, size) and entries, each with its kind, header size, payload
    size and, 28 bytes in, its compute capability.
    """
    headers = subprocess.check_output(["readelf", "-SW", str(library)], text=True)
    contents, zeroed = bytearray(library.read_bytes()), 0
    sections = r"(?:\.nv_fatbin|__nv_relfatbin)\s+PROGBITS\s+[0-9a-f]+\s+([0-9a-f]+)\s+([0-9a-f]+)"
    for offset, size in re.findall(sections, headers):
        place, end = int(offset, 16), int(offset, 16) + int(size, 16)
        while place + 16 <= end:
            magic, _, header_bytes, body_bytes = struct.unpack_from("<IHHQ", contents, place)
            if magic != FAT_BINARY_MAGIC:
                place += 8
                continue
            entry, place = place + header_bytes, place + header_bytes + body_bytes
            while entry + 32 <= place:
                _, _, entry_header, payload = struct.unpack_from("<HHIQ", contents, entry)
                if entry_header == 0:
                    break
                if struct.unpack_from("<I", contents, entry + 28)[0] != keep:
                    begin = entry + entry_header
                    contents[begin : begin + payload] = bytes(payload)
                    zeroed += payload
                entry += entry_header + payload
    if zeroed:
        library.write_bytes(contents)
    return zeroed


def slim(site: Path, keep: int) -> None:
    """Remove what UNUSED names, then code of other GPUs, then symbols that no linker needs.

    Raises:
        FileNotFoundError: a pattern of NEEDED finds nothing afterwards.
    """
    for pattern in UNUSED:
        for found in list(site.glob(pattern)):
            shutil.rmtree(found) if found.is_dir() and not found.is_symlink() else found.unlink(missing_ok=True)
    missing = [pattern for pattern in NEEDED if not any(site.glob(pattern))]
    if missing:
        raise FileNotFoundError(f"{site} lacks {', '.join(missing)}, without which the stack does not import")
    for library in site.rglob("*.so*"):
        if library.is_file() and not library.is_symlink() and library.stat().st_size > STRIP_FROM_BYTES:
            zeroed = zero_foreign_cubins(library, keep)
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False, capture_output=True)
            if zeroed > 1_000_000:
                print(f"{library.relative_to(site)}: {zeroed / 1e6:.0f} MB of other GPUs' code zeroed", flush=True)


def pack(site: Path, out: Path, part_mib: int) -> list[Path]:
    """The parts `part.aa`, `part.ab`, … of one xz stream, whose blocks a host's cores unpack side by side."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part.*"):
        old.unlink()
    xz = "xz --threads=0 --x86 --lzma2=preset=1,dict=16MiB --block-size=32MiB"
    tar = f"tar --create --owner=0 --group=0 --directory {site} ."
    subprocess.run(["sh", "-c", f"{tar} | {xz} | split --bytes={part_mib}M - {out}/part."], check=True)
    return sorted(out.glob("part.*"))


def main() -> None:
    """Download, unpack, slim, pack; print the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for wheels and their contents, some 6 GB")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part-mib", type=int, default=55)
    parser.add_argument("--keep", type=int, default=90, help="compute capability of the host's GPU")
    arguments = parser.parse_args()
    site = arguments.work / "site"
    shutil.rmtree(site, ignore_errors=True)
    wheels = map(str, download(arguments.work))
    subprocess.run([*PIP, "install", *TARGET, "--no-compile", "--target", str(site), *wheels], check=True)
    slim(site, arguments.keep)
    versions = "\n".join(WHEELS) + "\n"
    (site / "versions.txt").write_text(versions)
    parts = pack(site, arguments.out, arguments.part_mib)
    print(versions + "\n".join(f"{part.name} {part.stat().st_size / 2**20:.1f} MiB" for part in parts))


if __name__ == "__main__":
    main()
