"""The changes to the graph, in the form in which Inductor takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.fx import Graph

from deltasam._torch import inductor_pass
from deltasam.speed.compiling._attention import write_out_attention
from deltasam.speed.compiling._gradients import keep_float32
from deltasam.speed.compiling._merge import merge_layers

_CustomGraphPass, _hash_of_files = inductor_pass()


class _Pass(_CustomGraphPass):  # type: ignore[misc]
    """A change that compiled code in Inductor's cache is told by: another source, another entry."""

    def uuid(self) -> Any:
        return _hash_of_files(tuple(sorted(str(path) for path in Path(__file__).parent.glob("*.py"))))


class BeforeGradients(_Pass):
    """On the graph of the forward pass, of which the backward pass is made."""

    def __call__(self, graph: Graph) -> None:
        merge_layers(graph)
        write_out_attention(graph)


class AfterGradients(_Pass):
    """On the graphs of both passes, in their last form."""

    def __call__(self, graph: Graph) -> None:
        keep_float32(graph)


PASSES: dict[str, Any] = {
    "pre_grad_custom_pass": BeforeGradients(),
    "post_grad_custom_post_pass": AfterGradients(),
}
