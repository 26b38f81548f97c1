"""``deltasam.step.fused``: w + step * d for all parameters in one kernel, by a table of addresses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltasam.step import fused
from deltasam.step.fused.noise import Noise
from deltasam.step.moving import _in_place, _recorded, perturbed

CPU = torch.device("cpu")


class Slow:
    """The kernel in Python, block by block; it gets only numbers and addresses."""

    def __init__(self, *, mirrored: bool = False) -> None:
        self.mirrored = mirrored
        self.waiting: list[Any] = []
        self.launches = 0
        self.codes: list[list[int]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda table, step, seed, number, **options: self.waiting.append(
            (grid[0], table, step, number, options["BLOCK"])
        )

    def replay(self) -> None:
        for blocks, table, step, number, size in self.waiting:
            self.launches += 1
            ends, begins, sizes, weights, directions, outs, codes = table.view(7, number).tolist()
            self.codes.append(codes)
            s = float(step)
            for block in range(blocks):
                mine = sum(end <= block for end in ends)
                start = (block - begins[mine]) * size
                assert 0 <= start < sizes[mine]
                for at in range(start, min(start + size, sizes[mine])):
                    w, d, out = (ctypes.c_float.from_address(p[mine] + 4 * at) for p in (weights, directions, outs))
                    out.value = w.value if s == 0 else w.value + s * d.value
                    if self.mirrored:
                        d.value = w.value + (w.value - out.value)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    kernel = Slow()
    monkeypatch.setitem(
        sys.modules,
        "deltasam.step.fused._kernel",
        SimpleNamespace(move_kernel=kernel, tl=SimpleNamespace(float32=None)),
    )
    monkeypatch.setattr(fused, "_BLOCK", 16)
    yield kernel
    assert fused.Tables._current is None


@pytest.fixture
def slow_mirror(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Slow:
    kernel = Slow(mirrored=True)
    monkeypatch.setattr(sys.modules["deltasam.step.fused._kernel"], "mirrored_move_kernel", kernel, raising=False)
    monkeypatch.setattr(fused, "can_mirror", lambda device: True)
    return kernel


def pairs(*shapes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.randn(s) for s in shapes], [torch.randn(s) for s in shapes]


def test_every_block_finds_its_tensor(slow: Slow) -> None:
    w, d = pairs((3, 4), (16,), (5, 20), (64,))
    tables = fused.Tables(CPU)
    with tables.open():
        out = fused.moved(w, d, torch.tensor(0.25))
    slow.replay()  # as in a graph: after the recording, when the table has been sent
    assert slow.launches == 1
    for w_k, d_k, out_k in zip(w, d, out, strict=True):
        assert out_k is not None
        torch.testing.assert_close(out_k, w_k + 0.25 * d_k)


def test_a_zero_step_ignores_directions_that_are_not_finite(slow: Slow) -> None:
    w, d = pairs((4, 4))
    d[0][1, 2] = float("nan")
    with fused.Tables(CPU).open():
        (out,) = fused.moved(w, d, torch.tensor(0.0))
    slow.replay()
    assert out is not None
    assert torch.equal(out, w[0])


def test_unsupported_tensors_are_left_to_torch(slow: Slow) -> None:
    w, d = pairs((4, 4), (5,), (4, 8), (8, 4), (8,), (0,))
    w[2], d[2] = w[2].double(), d[2].double()
    d[3] = torch.randn(4, 8).t()  # another layout
    d[4] = torch.randn(12)[1:9]  # not aligned
    with fused.Tables(CPU).open():
        assert [out is not None for out in fused.moved(w, d, torch.tensor(1.0))] == [True] + [False] * 5
    assert fused.moved(w[:1], d[:1], torch.tensor(1.0)) == [None]  # nothing is recorded


def test_transposed_weights_keep_their_layout(slow: Slow) -> None:
    w, d = [torch.randn(8, 4).t()], [torch.randn(8, 4).t()]
    with fused.Tables(CPU).open():
        (out,) = fused.moved(w, d, torch.tensor(0.5))
    slow.replay()
    assert out is not None
    assert out.stride() == w[0].stride()
    torch.testing.assert_close(out, w[0] + 0.5 * d[0])


def test_several_launches_until_the_table_is_full(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_MOST", 2)
    monkeypatch.setattr(fused, "_ROOM", 35)
    w, d = pairs(*[(4,)] * 5)
    with fused.Tables(CPU).open():
        first = fused.moved(w, d, torch.tensor(1.0))  # 14 + 14 + 7 numbers
        second = fused.moved(w, d, torch.tensor(1.0))
    slow.replay()
    assert slow.launches == 3
    torch.testing.assert_close(first, [a + b for a, b in zip(w, d, strict=True)])
    assert second == [None] * 5


def test_a_recorded_move_of_supported_and_unsupported_tensors(slow: Slow) -> None:
    params = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(8))]
    before = [p.detach().clone() for p in params]
    direction = [torch.randn_like(p) for p in params]
    wanted = [p + 0.5 * d for p, d in zip(before, direction, strict=True)]
    kept = list(direction)  # a graph does not share its memory
    with fused.Tables(CPU).open(), _recorded(params, direction, torch.tensor(0.5)):
        values = [p.data for p in params]
    slow.replay()
    assert kept
    assert not direction
    torch.testing.assert_close(values, wanted)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_the_table_contains_the_grid_of_every_tensor(slow: Slow) -> None:
    w, d = pairs((4, 4), (8,), (16,), (4,))
    with fused.Tables(CPU).open():
        kept = fused.moved(w, d, torch.tensor(0.5), ["bf16", None, "fp16", "tf32"], torch.tensor(3))
    slow.replay()
    assert len(kept) == 4
    assert slow.codes == [[1, 0, 2, 3]]


def test_a_recorded_move_of_supported_tensors_only(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch's kernels for several tensors refuse an empty list."""
    own = torch._foreach_copy_

    def strict(first: list[Tensor], *rest: Any) -> None:
        assert first, "Tensor list must have at least one tensor."
        own(first, *rest)

    monkeypatch.setattr(torch, "_foreach_copy_", strict)
    params = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(8))]
    direction = [torch.ones_like(p) for p in params]
    kept = list(direction)
    with fused.Tables(CPU).open(), _recorded(params, direction, torch.tensor(0.5)):
        values = [p.data for p in params]
    slow.replay()
    torch.testing.assert_close(values, [p.detach() + 0.5 * d for p, d in zip(params, kept, strict=True)])


def test_both_sides_of_w_in_one_kernel_are_those_of_two(slow_mirror: Slow) -> None:
    """The sizes: supported, not a multiple of four, two blocks. The other side takes the memory of the direction."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((4, 4), (5,), (8, 4))]
    before = [p.detach().clone() for p in params]
    r = [torch.randn_like(p) for p in params]
    step = torch.tensor(0.3)
    with _in_place(params, [d.clone() for d in r], step) as moved:
        wanted = [p.detach().clone() for p in params]
        moved.mirror()
        wanted += [p.detach().clone() for p in params]
    with fused.Tables(CPU).open(), perturbed(params, list(r), step, mirrored=True) as moved:
        pass  # on a CPU nothing is recorded
    assert not slow_mirror.waiting
    with fused.Tables(CPU).open(), _recorded(params, list(r), step, mirrored=True) as moved:
        found = [p.data for p in params]
        moved.mirror()
        found += [p.data for p in params]
        assert [p.data_ptr() == d.data_ptr() for p, d in zip(params, r, strict=True)] == [True, False, True]
    slow_mirror.replay()
    assert slow_mirror.launches == 1
    torch.testing.assert_close(found, wanted)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_a_failing_kernel_for_both_sides_falls_back_with_one_warning(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    """The module of kernels has no such kernel here."""
    fused.can_mirror.cache_clear()
    w, d = pairs((4, 4))
    with fused.Tables(CPU).open():
        for _ in range(2):
            assert fused.mirrored(w, d, torch.tensor(0.5)) == ([None], [None])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    fused.can_mirror.cache_clear()


def test_tables_are_aligned(slow: Slow) -> None:
    """Triton compiles another kernel for addresses that are not multiples of 16; a recording may not survive it."""
    tables = fused.Tables(CPU)
    taken = [tables.take([[1, 2, 3]]) for _ in range(3)]
    tables.send()
    assert all(table is not None and table.data_ptr() % 16 == taken[0].data_ptr() % 16 for table in taken)
    assert [table.tolist() for table in taken if table is not None] == [[1, 2, 3]] * 3


def test_without_a_gpu_or_triton_it_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fused.is_ready.cache_clear()
    assert not fused.is_ready(CPU)
    monkeypatch.setitem(sys.modules, "deltasam.step.fused._kernel", None)
    assert not fused.is_ready(torch.device("cuda:0"))
    fused.is_ready.cache_clear()


def test_the_kernel_itself_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", minversion="3.3")  # with NumPy 2, earlier interpreters make wider random numbers
    code = "import torch; from deltasam.step import fused; cpu = torch.device('cpu'); "
    code += "print(fused.works(cpu) and fused.mirrors(cpu))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "True", done.stderr


def test_one_sweep_finds_the_same_tensors_as_one_question_after_the_other() -> None:
    flat = torch.zeros(4 * 64)
    tensors = [flat[0:8], flat[8:15], flat[17:25], flat[32:32], flat[32:48].view(4, 4), flat[64:80].view(1, 16)]
    assert [k for k, t in enumerate(tensors) if t.data_ptr() % 16] == [2]
    directions = [torch.ones_like(t) for t in tensors]
    odd: list[tuple[list[Tensor], list[Any]]] = [
        ([], []),
        ([flat[0:16].view(4, 4).T], [torch.ones(4, 4)]),
        ([torch.zeros(8, dtype=torch.bfloat16)], [torch.ones(8, dtype=torch.bfloat16)]),
        ([torch.zeros(4, 4)], [torch.eye(4).to_sparse()]),
        ([nn.Parameter(torch.zeros(8))], [torch.ones(8)]),
        ([torch.zeros(8)], [Noise(torch.ones(1), 8, False, torch.tensor(0))]),
    ]
    for more, others in odd:
        weights, direction = [*tensors, *more], [*directions, *others]
        grids: list[Any] = ["bf16"] * len(weights)
        pairs = enumerate(zip(weights, direction, strict=True))
        wanted = [k for k, (w, d) in pairs if fused._fits(w, d, "bf16", CPU)]
        assert fused._fitting(weights, direction, grids, CPU) == wanted
        assert wanted[:3] == [0, 4, 5]
