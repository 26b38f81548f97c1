"""The benchmark on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from deltasam.lab.bench._measure import measure
from deltasam.lab.bench._memory import peak_bytes
from deltasam.lab.bench.options import StepOptions


@pytest.mark.gpu
def test_peak_on_the_device() -> None:
    device = torch.device("cuda")
    assert peak_bytes(lambda: torch.ones(2**20, device=device), device) == 4 * 2**20


@pytest.mark.gpu
def test_sam_needs_one_copy_on_the_device() -> None:
    options = StepOptions(model="mlp", hidden=2048, batch=4, rounds=1, warmup=1, device="cuda", third_party=False)
    rows = {row.name: row for row in measure(options).rows}
    assert 0.9 < rows["SAM"].extra_copies <= 1.05
    assert 0.9 < rows["DeltaSAM"].extra_copies <= 1.05


@pytest.mark.gpu
def test_captured_steps_need_at_least_the_memory_of_eager_ones() -> None:
    options = StepOptions(
        model="mlp", hidden=2048, batch=4, rounds=1, warmup=1, device="cuda", third_party=False, methods=("sam",),
        ways=("eager", "captured"),
    )  # fmt: skip
    rows = {row.name: row for row in measure(options).rows}
    eager, captured = rows["SAM"].peak_bytes, rows["SAM captured"].peak_bytes
    assert 0.95 * eager < captured < 1.5 * eager + 128 * 2**20  # and a workspace for matrix products


@pytest.mark.gpu
def test_captured_lora_steps_are_compared_with_captured_plain_lora() -> None:
    pytest.importorskip("transformers")
    options = StepOptions(
        lora=True, model="llama-tiny", batch=2, length=32, rounds=1, warmup=1, device="cuda",
        methods=("per-instance-sam:params=adapters",), ways=("eager", "captured"),
    )  # fmt: skip
    result = measure(options)
    rows = {row.name: row for row in result.rows}
    name = "PerInstanceSAM(params=adapters)"
    assert list(rows) == ["plain LoRA", "plain loop", name, "plain LoRA captured", f"{name} captured"], result.failures
    for row in rows.values():
        assert row.peak_bytes < row.total_bytes <= row.reserved_bytes
        assert row.memory_times_plain is not None
    assert rows[f"{name} captured"].seconds.median < rows[name].seconds.median  # a replayed graph launches once
