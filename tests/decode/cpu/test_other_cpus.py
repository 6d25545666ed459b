"""The kernels as other CPUs have them: compiled for their instructions, and run here or under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decode.cpu.native_ops import COMPILER, FLAGS, FOLDER
from tests.support.models import needs_compiler

SOURCE, CPUS = Path(__file__).with_name("kernels.cpp"), Path("/proc/cpuinfo")
FEATURES = CPUS.read_text().split() if CPUS.exists() else []  # of this CPU, as Linux names them
INTEL = {  # name: what the compiler and the CPU need
    "AVX2": ("-march=x86-64-v3", "avx2"),
    "AVX-VNNI": ("-march=x86-64-v3 -mavxvnni", "avx_vnni"),
    "AVX-512 without VNNI": ("-march=x86-64-v4", "avx512bw"),
    "no AVX": ("-march=x86-64", "sse2"),
}
ARM = {"with products of bytes": "-march=armv8.2-a+dotprod", "without": "-march=armv8-a"}
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"  # Debian: g++-aarch64-linux-gnu, qemu-user

pytestmark = [needs_compiler, pytest.mark.slow]


def run_kernels(tmp_path: Path, compiler: str, flags: str, *emulator: str) -> None:
    """Fails with what the kernels computed wrong."""
    program = tmp_path / "kernels"
    general = [flag for flag in FLAGS if flag != "-march=native"]
    subprocess.run([compiler, *general, *flags.split(), f"-I{FOLDER}", str(SOURCE), "-o", str(program)], check=True)
    result = subprocess.run([*emulator, str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", INTEL)
def test_intel_and_amd(name: str, tmp_path: Path) -> None:
    flags, needed = INTEL[name]
    if needed not in FEATURES:
        pytest.skip(f"this CPU has no {needed}")
    run_kernels(tmp_path, os.environ.get("CXX", COMPILER), flags)


@pytest.mark.skipif(not (shutil.which(ARM_COMPILER) and shutil.which(ARM_EMULATOR)), reason="no compiler, no emulator")
@pytest.mark.parametrize("name", ARM)
def test_arm(name: str, tmp_path: Path) -> None:
    run_kernels(tmp_path, ARM_COMPILER, f"{ARM[name]} -static", ARM_EMULATOR, "-cpu", "max")


@pytest.mark.skipif("avx2" not in FEATURES, reason="this CPU has no AVX2")
def test_the_ops_without_avx_512(tmp_path: Path) -> None:
    """`DRAFTLESS_CXXFLAGS` chooses instructions, and all products of blocks are right with those."""
    tests = [str(SOURCE.with_name(name)) for name in ("test_blocks.py", "test_native_ops.py")]
    environment = {**os.environ, "DRAFTLESS_CXXFLAGS": "-march=x86-64-v3"}
    command = [sys.executable, "-m", "pytest", "-q", "--exitfirst", f"--basetemp={tmp_path / 'tests'}", *tests]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
