"""A function of tensors of fixed shape, captured once and replayed: CUDA graphs.

Launching the kernels of a small pass takes the host longer than the device needs to run them. A
graph launches all of them at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pass = Callable[..., tuple[Tensor, ...]]
"""Reads its arguments and tensors that it holds, writes to such tensors, returns new ones."""
_NUM_WARMUP = 3


class Captured:
    """A pass on static copies of its arguments.

    What it returns lives in memory that the next call overwrites. On a CPU there is nothing to
    capture and the function runs as it is, which is how its shapes and addresses are tested.
    """

    def __init__(self, function: Pass, arguments: Sequence[Tensor]) -> None:
        """Run the function a few times, then capture it on a GPU; it must bear being repeated."""
        self._function = function
        self._arguments = [argument.clone() for argument in arguments]
        self._outputs: tuple[Tensor, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._device = arguments[0].device
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # streams and graphs are of the current one
                self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARMUP):
                self._function(*self._arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._function(*self._arguments)

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Run the pass on other values of the same shapes."""
        for own, given in zip(self._arguments, arguments, strict=True):
            own.copy_(given)
        if self._graph is None:
            return self._function(*self._arguments)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._outputs
