"""A second device for torch on a machine that has none: `load` makes `torch.device("second")` work in this process."""

import subprocess
import types
from pathlib import Path

import torch
from torch.utils import backend_registration


def build(folder: Path) -> Path:
    """The compiled backend, made in `folder` by the machine's C++ compiler, some seven seconds."""
    root, library = Path(torch.__file__).parent, folder / "second_device.so"
    headers = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    source = str(Path(__file__).with_name("device.cpp"))
    links = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    options = [
        "-std=c++20",
        "-O0",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    subprocess.run(["c++", *options, *headers, source, "-o", str(library), *links], check=True)
    return library


def load(library: Path) -> torch.device:
    """The device; for this process alone, and for good."""
    torch.ops.load_library(library)
    backend_registration.rename_privateuse1_backend("second")
    module = types.ModuleType("torch.second")
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
    }.items():
        setattr(module, name, lambda answer=answer: answer)
    module.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    torch._register_device_module("second", module)
    backend_registration.generate_methods_for_privateuse1_backend()
    return torch.device("second:0")
