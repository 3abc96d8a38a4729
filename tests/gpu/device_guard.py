"""Build and load `device_guard.cpp` on import, which must precede the import of torch; requires g++."""

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")


def build_device_guard() -> Path:
    """Build the library, once per installation of torch, in the directory of temporary files; returns its path."""
    torch_spec: Any = importlib.util.find_spec("torch")
    torch_folder = Path(torch_spec.origin).parent  # the library looks up those of torch there
    version = f"{SOURCE.read_text()}{importlib.metadata.version('torch')}{torch_folder}"
    version += sysconfig.get_config_var("SOABI")
    library = Path(tempfile.gettempdir()) / f"device_guard_{hashlib.sha256(version.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    headers, libraries = torch_folder / "include", torch_folder / "lib"
    includes = [headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
    temporary = library.with_suffix(f".{os.getpid()}")
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", *(f"-I{path}" for path in includes), str(SOURCE)]
    command += ["-o", str(temporary), f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return temporary.replace(library)  # atomic: other processes may build it at the same time


def load_device_guard() -> None:
    """Register the hooks before the import of torch, which reads them, and the guard after the import, which registers
    another one in a CUDA build."""
    loader = importlib.machinery.ExtensionFileLoader("device_guard_library", str(build_device_guard()))
    spec: Any = importlib.util.spec_from_loader("device_guard_library", loader)
    library = importlib.util.module_from_spec(spec)
    loader.exec_module(library)
    import torch  # noqa: F401

    library.register_guard()


load_device_guard()
