"""Ways in which a user may have allowed TF32, each in a separate process, because not all settings can be undone.

Run as a script it prints, as JSON, the answers of torch's getters for every way: untouched, after ``full_float32`` and
so on. It imports torch once and forks for every question.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from deltasam.step.float32 import float32_kept, full_float32, rounded

NEW = hasattr(torch.backends, "fp32_precision")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
KEYS = [("generic", "all"), *((kind, op) for kind in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))]
OLD_WAYS = {
    "nothing": "",
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "highest": "torch.set_float32_matmul_precision('highest')",
    "allowed products": "torch.backends.cuda.matmul.allow_tf32 = True",
    "allowed both": "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True",
    "forbidden convolutions": "torch.backends.cudnn.allow_tf32 = False",
    "high, forbidden convolutions": "torch.set_float32_matmul_precision('high'); "
    "torch.backends.cudnn.allow_tf32 = False",
}
NEW_WAYS = {
    "new products": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "new products and convolutions": "torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
    "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    "new convolutions ieee": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "new recurrent ieee": "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    "new CUDA": "torch.backends.cudnn.fp32_precision = 'tf32'",
    "new CUDA ieee": "torch.backends.cudnn.fp32_precision = 'ieee'",
    "new everything": "torch.backends.fp32_precision = 'tf32'",
    "new everything ieee": "torch.backends.fp32_precision = 'ieee'",
    "new everything bf16": "torch.backends.fp32_precision = 'bf16'",
    "new CPU products": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "high, then new ieee": "torch.set_float32_matmul_precision('high'); "
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "medium, then new none": "torch.set_float32_matmul_precision('medium'); "
    "torch.backends.mkldnn.matmul.fp32_precision = 'none'",
    "allowed both, then new everything ieee": "torch.backends.cudnn.allow_tf32 = True; "
    "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.fp32_precision = 'ieee'",
    "forbidden convolutions, then new everything": "torch.backends.cudnn.allow_tf32 = False; "
    "torch.backends.fp32_precision = 'tf32'",
    "new products, then highest": "torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
    "torch.set_float32_matmul_precision('highest')",
}
WAYS = OLD_WAYS | (NEW_WAYS if NEW else {})


def getters() -> dict[str, Any]:
    """The answer of every getter, or that it raises."""
    asked: dict[str, Callable[[], Any]] = {
        "precision": torch.get_float32_matmul_precision,
        "products": lambda: torch.backends.cuda.matmul.allow_tf32,
        "convolutions": lambda: torch.backends.cudnn.allow_tf32,
    }
    answers: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            answers[name] = ask()
        except RuntimeError:
            answers[name] = "raises"
    if NEW:
        answers |= {f"{kind} {op}": torch._C._get_fp32_precision_getter(kind, op) for kind, op in KEYS}
    return answers


def later_answers() -> list[dict[str, Any]]:
    """The answers now and after further settings, so that settings that only look alike can be distinguished."""
    answers = [getters()]
    for kind, op in KEYS if NEW else ():
        for value in ("ieee", "tf32", "none"):
            torch._C._set_fp32_precision_setter(kind, op, value)
            answers.append(getters())
    for value in ("medium", "highest"):
        torch.set_float32_matmul_precision(value)
        answers.append(getters())
    return answers


def after_the_block(device: torch.device) -> Any:
    with full_float32(device):
        torch.ones(2, 2) @ torch.ones(2, 2)
    return later_answers()


def after_an_error() -> Any:
    with suppress(ZeroDivisionError), full_float32(CUDA):
        raise ZeroDivisionError
    return later_answers()


def after_blocks_in_blocks() -> Any:
    with full_float32(CPU), full_float32(CUDA):
        inside = getters()
        with full_float32(CUDA):
            assert getters() == inside
        assert getters() == inside
    return later_answers()


def after_a_run() -> Any:
    from deltasam.lab.experiments import _run

    torch.cuda.is_available = lambda: True
    torch.cuda.reset_peak_memory_stats = lambda *a: None
    for wanted, rounds in (("tf32", True), ("fp32", False)):
        with _run._precision(wanted):
            assert ("matmul" in rounded(CUDA)) is rounds, wanted
            assert torch.get_float32_matmul_precision() == ("high" if rounds else "highest")
    return later_answers()


def inside(device: torch.device) -> Any:
    with full_float32(device):
        return {"getters": getters(), "rounded": sorted(rounded(device))}


def kept() -> Any:
    with float32_kept():
        torch.set_float32_matmul_precision("medium")
        if NEW:
            torch.backends.fp32_precision = "tf32"
            torch.backends.cuda.matmul.fp32_precision = "ieee"
    return later_answers()


def works() -> Any:
    """A step of delta-SAM, an analysis, the key of a graph: on the CPU, with the settings for both devices."""
    from deltasam.analysis import alignment
    from deltasam.methods import DeltaSAM
    from deltasam.speed.capture._key import surroundings_key
    from deltasam.weighting import FiniteDifference, OwnGradient
    from helpers.problems import TRANSFORMER_NO_DROPOUT

    before = getters()
    model, batch, objective = TRANSFORMER_NO_DROPOUT.make(torch.float32, size=4)
    for weighting in (FiniteDifference(), OwnGradient()):
        DeltaSAM(weighting=weighting).backward(model, batch, objective)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert alignment(model, [batch], objective, weightings={"fd": FiniteDifference()}, progress=False)
    key = surroundings_key(CUDA)
    with full_float32(CUDA):
        other = surroundings_key(CUDA)
    assert (key == other) is (not rounded(CUDA))
    assert surroundings_key(CUDA) == key
    assert hash(key) == hash(surroundings_key(CUDA))
    assert getters() == before
    return {"rounded": sorted(rounded(CUDA))}


QUESTIONS: dict[str, Callable[[], Any]] = {
    "untouched": later_answers,
    "after cuda": lambda: after_the_block(CUDA),
    "after cpu": lambda: after_the_block(CPU),
    "after an error": after_an_error,
    "after blocks in blocks": after_blocks_in_blocks,
    "after a run": after_a_run,
    "kept": kept,
    "inside cuda": lambda: inside(CUDA),
    "inside cpu": lambda: inside(CPU),
    "works": works,
}


def answered(way: str, question: Callable[[], Any]) -> Any:
    """The answer of a forked process with these settings."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(send, "w") as pipe:
            try:
                exec(way)
                json.dump(question(), pipe)
            except BaseException:  # noqa: BLE001 - reported by the test
                json.dump({"error": traceback.format_exc()}, pipe)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer


if __name__ == "__main__":
    torch.set_num_threads(1)
    import deltasam.analysis  # once, not in every fork
    import deltasam.lab.experiments._run
    import deltasam.methods  # noqa: F401

    answers_by_way = {name: {ask: answered(way, q) for ask, q in QUESTIONS.items()} for name, way in WAYS.items()}
    json.dump(answers_by_way, sys.stdout)
