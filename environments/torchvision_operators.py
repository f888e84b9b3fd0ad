"""Lets torchvision be imported where its compiled half does not fit the installed torch.

The package index's torchvision is compiled for CUDA; beside a CPU build of torch its library does not load, and the
import then breaks on two operators that nobody has declared. vLLM imports torchvision and needs neither. `vllm.sh`
copies this file into the environment together with a `.pth` line that imports it in every interpreter there.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
_LIBRARIES = []


class _DeclareFirst(importlib.abc.MetaPathFinder):
    """Finds nothing itself; declares the operators when torchvision is about to be imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)  # the declaration lives as long as this object


sys.meta_path.insert(0, _DeclareFirst())
