"""Every preset resolves, and has the values of the papers."""

from __future__ import annotations

import pytest

from deltasam.lab.experiments import preset_names, resolve
from deltasam.methods import ERM, SAM, DeltaSAM, FreeLB, PerInstanceSAM

# R-Drop's README: batch, updates, warm-up.
RDROP = {
    "mnli": (32, 123873, 7432),
    "qnli": (32, 33112, 1986),
    "qqp": (32, 113272, 28318),
    "rte": (8, 2036, 122),
    "sst2": (32, 20935, 1256),
    "mrpc": (16, 2296, 137),
    "cola": (16, 5336, 320),
    "stsb": (16, 3598, 214),
}
# The appendix of the paper: rho and eta.
PAPER = {
    "bert-base": {**dict.fromkeys(RDROP, (0.05, 1e-4)), "rte": (0.05, 5e-4), "stsb": (0.01, 1e-4)},
    "roberta-large": {**dict.fromkeys(RDROP, (0.02, 1e-4)), "rte": (0.02, 5e-4), "stsb": (0.01, 1e-4)},
}
# FreeLB's launch scripts for RoBERTa-large: lr, batch, updates, warm-up, adv_lr, adv_steps + 1, init_mag, max_norm.
FREELB = {
    "mnli": (1e-5, 33, 123873, 7432, 0.1, 3, 0.1, 0.3),
    "qnli": (1e-5, 32, 33112, 1986, 0.1, 3, 0.2, 0.2),
    "qqp": (1e-5, 32, 113272, 28318, 0.2, 3, 0.32, 0.7),
    "sst2": (1e-5, 32, 20935, 1256, 0.1, 3, 1.0, 0.6),
    "mrpc": (5e-6, 16, 2296, 137, 0.04, 4, 0.64, 0.4),
    "cola": (1e-5, 16, 5536, 320, 0.025, 4, 0.4, 0.3),
    "stsb": (2e-5, 16, 3598, 214, 0.1, 4, 0.16, 0.28),
    "rte": (1e-5, 16, 2036, 122, 0.06, 4, 0.16, 0.14),
}
GLUE = [(model, task) for model in PAPER for task in RDROP]


def test_every_preset_resolves_and_is_another_run() -> None:
    names = preset_names()
    assert len(names) == len(set(names)) > 200
    configs = {name: resolve(preset=name) for name in names}
    assert len({config.run_id for config in configs.values()}) == len(names)
    assert {name.partition("/")[0] for name in names} == {
        "glue",
        "sts",
        "summarization",
        "small",
        "quickstart",
        "quickstart-llm",
        "llm",
    }


@pytest.mark.parametrize(("model", "task"), GLUE)
def test_glue_is_r_drops(model: str, task: str) -> None:
    config = resolve(preset=f"glue/{model}/{task}")
    assert config.task.name == task
    assert config.model.path == {"bert-base": "bert-base-cased", "roberta-large": "roberta-large"}[model]
    assert (config.batch.size, config.schedule.steps, config.schedule.warmup_steps) == RDROP[task]
    assert config.schedule.kind == "polynomial"
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (1e-5, (0.9, 0.98), 1e-6, 0.01)
    expected = (1.0, False, 1e-7, 128) if model == "bert-base" else (0.0, True, 0.0, 512)
    assert (optimizer.max_grad_norm, optimizer.decay_all, config.schedule.lr_end, config.task.max_length) == expected
    assert config.method == ERM()
    assert config.regularisers == ()


@pytest.mark.parametrize(("model", "task"), GLUE)
def test_glue_perturbations_are_the_appendix(model: str, task: str) -> None:
    rho, eta = PAPER[model][task]
    assert resolve(preset=f"glue/{model}/{task}/sam").method == SAM(rho=rho)
    assert resolve(preset=f"glue/{model}/{task}/delta-sam").method == DeltaSAM(rho=rho, eta=eta)
    exact = resolve(preset=f"glue/{model}/{task}/per-instance")
    assert exact.method == PerInstanceSAM(rho=rho)
    assert exact.schedule.steps == 2 * RDROP[task][1]  # twice the epochs
    assert exact.schedule.warmup_steps == 2 * RDROP[task][2]


@pytest.mark.parametrize(("model", "task"), GLUE)
def test_glue_compared_methods(model: str, task: str) -> None:
    lr, batch, steps, warmup, *adversary = FREELB[task]
    freelb = resolve(preset=f"glue/{model}/{task}/freelb")
    names = ("adv_lr", "adv_steps", "init_magnitude", "max_norm")
    assert freelb.method == FreeLB(**dict(zip(names, adversary, strict=True)))
    if model == "roberta-large":
        found = (freelb.optimizer.lr, freelb.batch.size, freelb.schedule.steps, freelb.schedule.warmup_steps)
        assert found == (lr, batch, steps, warmup)
        assert (freelb.optimizer.betas, freelb.optimizer.weight_decay) == ((0.9, 0.999), 0.1)
    rdrop = resolve(preset=f"glue/{model}/{task}/r-drop").regularisers[0]
    assert (rdrop.name, rdrop.options["alpha"]) == ("RDrop", {"bert-base": 0.5, "roberta-large": 0.7}[model])
    r3f = resolve(preset=f"glue/{model}/{task}/r3f").regularisers[0]
    assert (r3f.name, r3f.options) == ("R3F", {"eps": 1e-5, "lam": 0.7 if task == "rte" else 1.0, "noise": "uniform"})
    smart = resolve(preset=f"glue/{model}/{task}/smart").regularisers[0]
    values = {"lam": 1.0, "mu": 1.0, "epsilon": 1e-5, "sigma": 1e-5, "eta": 1e-3, "steps": 1}
    assert (smart.name, smart.options) == ("SMART", values)


@pytest.mark.parametrize(
    ("name", "path", "pooling", "rho", "noise"),
    [
        ("mirror-bert", "bert-base-uncased", "mean-all", 0.1, 0.1),
        ("mirror-roberta", "roberta-base", "cls", 0.02, 0.2),
    ],
)
def test_mirror(name: str, path: str, pooling: str, rho: float, noise: float) -> None:
    config = resolve(preset=f"sts/{name}")
    assert (config.model.path, config.model.dropout, config.task.pooling) == (path, 0.1, pooling)
    assert (config.task.temperature, config.task.max_length, config.task.eval_max_length) == (0.04, 50, 64)
    assert (config.task.span, config.task.adversary, config.task.eval_split) == (5, "second", "test")
    assert (config.batch.size, config.batch.drop_last, config.schedule.epochs) == (200, True, 1.0)
    assert config.schedule.total(config.batch.updates_per_epoch(10_000)) == 50
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("constant", 0)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (2e-5, (0.9, 0.999), 1e-8, 0.01)
    assert (optimizer.decay_all, optimizer.max_grad_norm) == (True, 0.0)
    assert resolve(preset=f"sts/{name}/sam").method == SAM(rho=rho)
    noisy = resolve(preset=f"sts/{name}/delta-sam-noise")
    assert noisy.method == DeltaSAM(rho=rho, eta=1.0)
    assert (noisy.regularisers[0].name, noisy.regularisers[0].options) == ("EmbeddingNoise", {"scale": noise})
    assert resolve(preset=f"sts/{name}/delta-sam").regularisers == ()
    assert resolve(preset=f"sts/{name}/r3f").method == ERM()


def test_summarization() -> None:
    bart = resolve(preset="summarization/bart-large")
    assert bart.model.path == "facebook/bart-large"
    assert (bart.schedule.steps, bart.schedule.warmup_steps, bart.optimizer.lr) == (20000, 500, 3e-5)
    assert (bart.optimizer.max_grad_norm, bart.optimizer.betas, bart.task.label_smoothing) == (0.1, (0.9, 0.999), 0.1)
    assert bart.batch.size * bart.batch.accumulation == 64
    task = bart.task
    assert (task.beams, task.length_penalty, task.min_target_length, task.max_target_length) == (4, 2.0, 56, 142)
    assert (task.no_repeat_ngram_size, task.max_length) == (3, 1024)
    assert resolve(preset="summarization/bart-large/delta-sam").method == DeltaSAM(rho=0.01, eta=1e-4)
    assert resolve(preset="summarization/bart-large/r-drop").regularisers[0].options == {"alpha": 0.7}
    assert resolve(preset="summarization/pegasus").task.beams == 8


def test_a_method_takes_its_variant() -> None:
    assert resolve(preset="glue/roberta-large/rte", method="delta-sam").method == DeltaSAM(rho=0.02, eta=5e-4)
    assert resolve(preset="glue/bert-base/rte", method="PerInstanceSAM").schedule.steps == 4072
    assert resolve(preset="sts/mirror-bert", method="sam").regularisers == ()
    other = resolve(preset="glue/bert-base/rte", method="asam", settings=["method.rho=0.3"])
    assert (type(other.method).__name__, other.method.rho, other.schedule.steps) == ("ASAM", 0.3, 2036)
