"""Importing this module, before torch, builds and loads `device_guard.cpp`; it needs g++."""

import importlib.util
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any


def load_device_guard() -> None:
    """Register the device guard."""
    torch_spec: Any = importlib.util.find_spec("torch")
    torch_folder = Path(torch_spec.origin).parent
    headers = torch_folder / "include"
    includes = [headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "device_guard.so"
        command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", *(f"-I{path}" for path in includes)]
        command += [str(Path(__file__).with_suffix(".cpp")), "-o", str(library)]
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        spec: Any = importlib.util.spec_from_file_location("device_guard_library", library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


load_device_guard()
