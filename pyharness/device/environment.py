"""What a run happened on: machine, Python, build, GPU. No host or user names, no absolute paths."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import psutil

from ..base import errors, system
from . import monitor

_VARIABLES = ("GGML_", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "NVIDIA_TF32")
_BUILD_KEYS = re.compile(
    r"GGML_\w+|BUILD_SHARED_LIBS|CMAKE_BUILD_TYPE|CMAKE_CUDA_ARCHITECTURES"
    r"|CMAKE_(C|CXX|CUDA)_FLAGS(_DEBUG|_RELEASE|_RELWITHDEBINFO)?"
)


def collect(directory: Path, mapped: list[Path]) -> dict[str, Any]:
    """Everything below; `directory` holds the ggml libraries, `mapped` are all files that this process maps."""
    return {
        "os": _os(),
        "cpu": _cpu(),
        "python": _python(),
        "build": build(directory),
        "gpu": gpu(),
        "runtimes": sorted(
            p.name for p in mapped if re.match(r"lib(cuda|cudart|cublas|cublasLt|cudnn|gomp|omp)\b", p.name)
        ),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES) and "/" not in v},
    }


def _os() -> dict[str, str]:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _cpu() -> dict[str, Any]:
    return {
        "name": system.cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": psutil.virtual_memory().total,
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load": [f"{value:.2f}" for value in psutil.getloadavg()],
    }


def _python() -> dict[str, Any]:
    installed = sorted(
        {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions() if d.metadata["Name"]}
    )
    owners: dict[str, set[str]] = {}  # packages_distributions() of Python 3.10 misses wheels without a top_level.txt
    for distribution in importlib.metadata.distributions():
        name = distribution.name
        for line in "\n".join(distribution.read_text(file) or "" for file in ("RECORD", "top_level.txt")).splitlines():
            owners.setdefault(re.split("[/.,]", line, maxsplit=1)[0], set()).add(name)
    loaded = {name for module in {m.partition(".")[0] for m in list(sys.modules)} for name in owners.get(module, ())}
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "packages": {name: importlib.metadata.version(name) for name in sorted(loaded)},
        "installed_sha256": hashlib.sha256("\n".join(installed).encode()).hexdigest(),
    }


def build(directory: Path) -> dict[str, Any] | None:
    """Build type, flags and compilers from the CMakeCache.txt in or above the libraries' folder; None without one."""
    cache = next(
        (d / "CMakeCache.txt" for d in [directory, *directory.parents][:4] if (d / "CMakeCache.txt").is_file()), None
    )
    if cache is None:
        return None
    options = {}
    for line in cache.read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"(\w+):(BOOL|STRING|UNINITIALIZED)=(.*)", line)
        if found and _BUILD_KEYS.fullmatch(found[1]) and "/" not in found[3]:
            options[found[1]] = found[3]
    compilers = {}
    for path in sorted(cache.parent.glob("CMakeFiles/*/CMake*Compiler.cmake")):
        text = path.read_text(encoding="utf-8")
        values = dict(re.findall(r'set\(CMAKE_\w+?_COMPILER_(ID|VERSION) "([^"]*)"\)', text))
        compilers[path.name.removeprefix("CMake").removesuffix("Compiler.cmake")] = " ".join(
            values[key] for key in ("ID", "VERSION") if key in values
        )
    return {"options": options, "compilers": compilers}


def gpu() -> dict[str, Any]:
    """Driver and GPUs through NVML; `devices` is null with the reason where there is none."""
    try:
        nvml = monitor.Nvml(0)
    except errors.Environment as e:
        return {"driver": None, "devices": None, "reason": str(e)}
    api = nvml.api
    devices = []
    for index in range(api.nvmlDeviceGetCount()):
        nvml.handle = api.nvmlDeviceGetHandleByIndex(index)
        memory, capability = nvml.get("MemoryInfo"), nvml.get("CudaComputeCapability")
        ecc, mig = nvml.get("EccMode"), nvml.get("MigMode")
        devices.append(
            {
                "name": _text(nvml.get("Name")),
                "memory_bytes": memory and memory.total,
                "compute_capability": capability and ".".join(map(str, capability)),
                "ecc": ecc and bool(ecc[0]),
                "mig": mig and bool(mig[0]),
                "power_limit_mw": nvml.get("EnforcedPowerLimit"),
                "max_sm_mhz": nvml.get("MaxClockInfo", api.NVML_CLOCK_SM),
                "max_mem_mhz": nvml.get("MaxClockInfo", api.NVML_CLOCK_MEM),
            }
        )
    return {"driver": _text(api.nvmlSystemGetDriverVersion()), "devices": devices, "reason": ""}


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
