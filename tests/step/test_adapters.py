"""Which parameters the presets select around adapters, and what they say about models without."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from deltasam import ASAM, SAM, CausalLM, DeltaSAM, PerInstanceSAM, RandomPerturbation, select
from deltasam.step.adapters import adapted_layers
from helpers.frozen import FAMILIES, OTHER_KINDS, Adapter, Small, adapted, run_of, small
from helpers.problems import cross_entropy
from helpers.promises import assert_intact, snapshot

peft = pytest.importorskip("peft")


def short(names: Any) -> set[str]:
    return {name.removeprefix("base_model.model.") for name in names}


def batch() -> Any:
    return torch.randint(9, (4, 5)), torch.randint(3, (4,))


def test_the_layers_that_carry_adapters() -> None:
    assert short(adapted_layers(small(modules_to_save=["score"]))) == {"up", "down"}
    assert adapted_layers(Small()) == {}
    assert list(adapted_layers(Adapter(nn.Linear(2, 2)))) == [""]


def test_what_the_presets_select() -> None:
    model = small(modules_to_save=["score"])
    adapters = {f"{layer}.lora_{which}.default.weight" for layer in ("up", "down") for which in "AB"}
    saved = {f"score.modules_to_save.default.{which}" for which in ("weight", "bias")}
    assert short(select(model)) == short(select(model, "trained")) == adapters | saved
    assert short(select(model, "adapters")) == short(select(model, "lora")) == adapters
    assert short(select(model, "base")) == {"up.base_layer.weight", "down.base_layer.weight"}
    assert set(select(model, "all")) == {name for name, _ in model.named_parameters()}
    assert short(select(model, "no-bias-norm")) == adapters | {"score.modules_to_save.default.weight"}
    assert short(select(model, lambda name, p: name.endswith("norm.weight"))) == {"norm.weight"}


def test_a_selection_changes_nothing() -> None:
    model = small()
    before = snapshot(model)
    for which in ("trained", "all", "base", "adapters"):
        select(model, which)
    assert_intact(model, before)


def test_the_base_may_be_trained() -> None:
    model = small()
    for p in select(model, "base").values():
        p.requires_grad_(True)
    assert short(select(model, "base")) == {"up.base_layer.weight", "down.base_layer.weight"}
    assert short(select(model, "adapters")) == {f"{x}.lora_{y}.default.weight" for x in ("up", "down") for y in "AB"}


def test_embeddings_and_convolutions_carry_adapters_too() -> None:
    pytest.importorskip("peft", "0.15")  # Conv1d
    model = small(("words", "mix"))
    assert short(select(model, "base")) == {"words.base_layer.weight", "mix.base_layer.weight"}
    adapters = short(select(model, "adapters"))
    assert {"words.lora_embedding_A.default", "mix.lora_A.default.weight"} <= adapters
    assert adapters == short(select(model, "trained"))


TIED = [
    {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    {"target_modules": ["embed_tokens", "lm_head"]},
]


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("settings", TIED, ids=["trainable tokens", "both layers"])
def test_a_tied_base_is_listed_and_moved_once(settings: dict[str, Any]) -> None:
    """The radius that a step reports is how far the weights have moved; both engines agree."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft", "0.15")  # trainable_token_indices
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=31, tie_word_embeddings=True, initializer_range=0.5, **sizes)
        lora = peft.LoraConfig(r=3, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora).double()
        return model

    model, seen = make(), []
    start = [p.detach().clone() for p in model.parameters()]
    ids = torch.randint(3, 31, (3, 6))
    given = {"input_ids": ids, "labels": ids}

    def objective(model: nn.Module, given: Any) -> Any:
        moves = [(p.detach() - w).norm() for p, w in zip(model.parameters(), start, strict=True)]
        seen.append(float(torch.stack(moves).norm()))
        return CausalLM()(model, given)

    chosen = select(model, "base")
    assert len({id(p) for p in chosen.values()}) == len(chosen)
    for method in (SAM(rho=0.05, params="base"), RandomPerturbation(rho=0.05, params="base", per="all")):
        step = method.backward(model, given, objective)
        assert max(seen) == pytest.approx(float(step.radius), rel=1e-6)
        seen.clear()
    found = []
    for engine in ("low-rank", "loop"):
        model = make()
        step = PerInstanceSAM(rho=0.05, params="base", engine=engine).backward(model, given, CausalLM())
        found.append([step.perturbed_losses, *(p.grad for p in model.parameters() if p.requires_grad)])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)  # norms of Llama are float32


def test_several_adapters_share_a_base() -> None:
    model = small()
    model.add_adapter("other", peft.LoraConfig(target_modules=["up"]))
    model.set_adapter("other")
    assert short(select(model, "base")) == {"up.base_layer.weight", "down.base_layer.weight"}
    assert short(select(model, "adapters")) == {"up.lora_A.other.weight", "up.lora_B.other.weight"}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_adapters(kind: str) -> None:
    if not hasattr(peft, kind):
        pytest.skip(f"this version of peft has no {kind}")
    model = small(kind=kind, **OTHER_KINDS[kind])
    assert short(select(model, "base")) == {"up.base_layer.weight", "down.base_layer.weight"}
    assert select(model, "adapters").keys() == select(model, "trained").keys()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "modules_to_save"])
def test_every_adapted_matrix_of_an_architecture(family: str, kind: str) -> None:
    model = adapted(family, kind)
    chosen = select(model, "base")
    assert len(chosen) == sum(isinstance(m, peft.tuners.lora.LoraLayer) for m in model.modules())
    assert all(p.ndim == 2 and not p.requires_grad and "base_layer.weight" in name for name, p in chosen.items())
    trained = set(select(model, "trained"))
    saved = {name for name in trained if "modules_to_save" in name}
    assert set(select(model, "adapters")) == trained - saved
    assert bool(saved) == (kind == "modules_to_save" or family == "BERT")


methods = pytest.mark.parametrize("method", [PerInstanceSAM, SAM, DeltaSAM, ASAM], ids=lambda m: m.__name__)


def refused(method: Any, model: nn.Module, message: str, params: Any = "base") -> None:
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        method(params=params).backward(model, batch(), cross_entropy)
    assert_intact(model, before)
    assert all(p.grad is None for p in model.parameters())


@methods
def test_without_adapters(method: Any) -> None:
    refused(method, Small(), r"params='base'.*no adapters.*get_peft_model")


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@methods
def test_adapters_of_vectors(method: Any) -> None:
    config = peft.LNTuningConfig(target_modules=["norm"])
    model = peft.get_peft_model(nn.Sequential(OrderedDict(layer=nn.Linear(6, 6), norm=nn.LayerNorm(6))), config)
    refused(method, model, r"params='base'.*adapters of vectors only")


def test_a_prompt_encoder_of_the_model_is_no_adapter() -> None:
    """Segment Anything has a part of this name."""
    parts = OrderedDict(prompt_encoder=nn.Linear(6, 6), decoder=nn.Linear(6, 6))
    with pytest.raises(ValueError, match="adapters"):
        select(nn.Sequential(parts), "adapters")
    config = peft.LoraConfig(r=2, target_modules=["decoder"], modules_to_save=["prompt_encoder"])
    model = peft.get_peft_model(nn.Sequential(parts), config)
    assert {name.split(".")[1] for name in short(select(model, "adapters"))} == {"lora_A", "lora_B"}


@methods
def test_merged_adapters(method: Any) -> None:
    model = small()
    model.merge_adapter()
    refused(method, model, r"params='base'.*merged.*unmerge_adapter")
    model.unmerge_adapter()
    method(params="base").backward(model, batch(), cross_entropy)  # the remedy


@methods
def test_adapters_merged_for_good(method: Any) -> None:
    model = small().merge_and_unload().requires_grad_(True)
    refused(method, model, r"params='base'.*no adapters")


@methods
def test_a_predicate_that_selects_nothing(method: Any) -> None:
    refused(method, small(), r"params=.*chose none of the \d+ parameters, e\.g\. ", params=lambda name, p: False)


def test_nothing_is_trained() -> None:
    refused(PerInstanceSAM, small().requires_grad_(False), "no trainable parameter.*requires_grad")


@pytest.mark.parametrize("which", ["bases", "LORA", "frozen", None, 3])
def test_an_unknown_preset(which: Any) -> None:
    with pytest.raises(ValueError, match=r"params=.*'trained'.*'base'.*'adapters'.*predicate"):
        PerInstanceSAM(params=which)


@pytest.mark.parametrize("family", ["GPT-2", "BERT"])
def test_selected_parameters_that_take_no_part_are_left_alone(family: str) -> None:
    """Of a part that is trained as a whole, PEFT keeps the original, which no pass uses."""
    model = adapted(family, "modules_to_save")
    _, data, objective = run_of(family, 3)
    before = snapshot(model)
    PerInstanceSAM(params=lambda name, p: "original_module" in name or "base_layer.weight" in name).backward(
        model, data, objective
    )
    assert_intact(model, before)
