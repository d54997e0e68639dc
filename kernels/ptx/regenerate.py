#!/usr/bin/env python3
"""Makes kvtide.ptx of ../cuda/kvtide.cu with NVRTC 12.4; no GPU, toolkit or driver is needed.

NVRTC comes from pip, into a folder below target/ that is kept for the next time.

  regenerate.py          writes kvtide.ptx
  regenerate.py --check  exits 1 if kvtide.ptx is not what the source gives, 77 where NVRTC
                         cannot be had

compute_80 runs on every GPU from A100 on, because the driver compiles PTX for the card it has.
NVRTC 12.4 writes PTX ISA 8.4, which drivers from R550 on take; a newer NVRTC would ask for a newer
driver.
"""

import ctypes
import difflib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

PACKAGE = "nvidia-cuda-nvrtc-cu12"
VERSION = "12.4.127"
OPTIONS = ["--gpu-architecture=compute_80", "--std=c++17", "--fmad=false"]

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "cuda" / "kvtide.cu"
RESULT = HERE / "kvtide.ptx"
UNAVAILABLE = 77


class Unavailable(Exception):
    """Why NVRTC cannot be had here."""


def cache() -> Path:
    target = os.environ.get("CARGO_TARGET_DIR") or HERE.parent.parent / "target"
    return Path(target) / f"nvrtc-{VERSION}"


def installed() -> Path:
    """The folder that holds NVRTC's two libraries."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Unavailable(f"{PACKAGE} is not made for {sys.platform} on {platform.machine()}")
    final = cache()
    libraries = final / "nvidia" / "cuda_nvrtc" / "lib"
    if not (libraries / "libnvrtc.so.12").exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        # Installed beside and renamed, so that an interrupted run leaves no half of it.
        work = Path(tempfile.mkdtemp(prefix="nvrtc-", dir=final.parent))
        try:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                       "--disable-pip-version-check", "--only-binary=:all:",
                       "--target", str(work), f"{PACKAGE}=={VERSION}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                said = (done.stderr or done.stdout).strip().splitlines()
                raise Unavailable(f"pip could not install {PACKAGE}=={VERSION}: "
                                  f"{said[-1] if said else 'it did not say why'}")
            shutil.rmtree(final, ignore_errors=True)
            work.chmod(0o755)
            work.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return libraries


def compiled(source: bytes) -> bytes:
    folder = installed()
    try:
        # libnvrtc opens the other one by its bare name, so it must be loaded before.
        ctypes.CDLL(str(folder / "libnvrtc-builtins.so.12.4"), mode=ctypes.RTLD_GLOBAL)
        nvrtc = ctypes.CDLL(str(folder / "libnvrtc.so.12"))
    except OSError as error:
        raise Unavailable(f"NVRTC could not be loaded: {error}") from error

    def must(code: int, what: str) -> None:
        if code != 0:
            raise SystemExit(f"{what} failed with NVRTC error {code}")

    program = ctypes.c_void_p()
    must(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kvtide.cu", 0, None, None),
         "nvrtcCreateProgram")
    options = (ctypes.c_char_p * len(OPTIONS))(*[option.encode() for option in OPTIONS])
    code = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    size = ctypes.c_size_t()
    must(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
    log = ctypes.create_string_buffer(size.value)
    must(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
    if log.value:
        print(log.value.decode(errors="replace"), file=sys.stderr)
    must(code, "the compilation")
    must(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)), "nvrtcGetPTXSize")
    ptx = ctypes.create_string_buffer(size.value)
    must(nvrtc.nvrtcGetPTX(program, ptx), "nvrtcGetPTX")
    # What it was made of, so that a test finds a source that changed where there is no NVRTC.
    made_of = f"// {SOURCE.name}: {len(source)} bytes, crc32 {zlib.crc32(source):08x}\n"
    return made_of.encode() + ptx.value


def main() -> int:
    arguments = sys.argv[1:]
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        ptx = compiled(SOURCE.read_bytes())
    except Unavailable as reason:
        print(f"the PTX was not made: {reason}", file=sys.stderr)
        return UNAVAILABLE
    if not arguments:
        RESULT.write_bytes(ptx)
        print(f"{RESULT.name}: {len(ptx)} bytes")
        return 0
    have = RESULT.read_bytes() if RESULT.exists() else b""
    if have == ptx:
        print(f"{RESULT.name} is what the source gives")
        return 0
    differences = difflib.unified_diff(have.decode().splitlines(), ptx.decode().splitlines(),
                                       "checked in", "from the source", lineterm="", n=1)
    for number, line in enumerate(differences):
        if number == 40:
            print("...")
            break
        print(line)
    print(f"{RESULT.name} is not what the source gives: run kernels/ptx/regenerate.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
