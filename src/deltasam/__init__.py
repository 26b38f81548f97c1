"""Sharpness-aware fine-tuning of language models, per instance.

A method replaces ``loss.backward()``: it fills ``.grad`` and leaves the weights bit for bit as they were.

    >>> import torch
    >>> from torch.nn.functional import cross_entropy
    >>> from deltasam import DeltaSAM
    >>> model = torch.nn.Linear(4, 2)
    >>> inputs, labels = torch.randn(8, 4), torch.randint(2, (8,))
    >>> method = DeltaSAM(rho=0.05, eta=1e-4)
    >>> step = method.backward(model, inputs, lambda model, x: cross_entropy(model(x), labels, reduction="none"))
    >>> step.losses.shape
    torch.Size([8])

The public names are imported when they are first used, so that ``import deltasam`` costs nothing.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Where each public name lives. The block for type checkers below says the same; a test compares the two.
_EXPORTS: dict[str, tuple[str, ...]] = {
    "deltasam.methods": (
        "ERM",
        "SAM",
        "DeltaSAM",
        "PerInstanceSAM",
        "ASAM",
        "GSAM",
        "ESAM",
        "LookSAM",
        "SubsetSAM",
        "FisherSAM",
        "FriendlySAM",
        "WSAM",
        "GradientNormPenalty",
        "FunctionalSAM",
        "MomentumSAM",
        "RandomPerturbation",
        "RWSAM",
        "MultiStepSAM",
        "AWP",
        "TRAM",
        "BiLoRA",
        "FreeLB",
        "TAT",
        "TAVAT",
        "Method",
        "Step",
    ),
    "deltasam.weighting": (
        "FiniteDifference",
        "Directional",
        "OwnGradient",
        "Uniform",
        "LossWeights",
        "RandomWeights",
        "NormWeights",
        "Weighting",
    ),
    "deltasam.objectives": (
        "Classification",
        "Regression",
        "Tokens",
        "CausalLM",
        "PackedCausalLM",
        "Seq2Seq",
        "Contrastive",
        "DPO",
        "RDrop",
        "R3F",
        "SMART",
        "VAT",
        "EmbeddingNoise",
        "NEFTune",
        "LabelSmoothing",
        "Objective",
    ),
    "deltasam.step.averaging": ("WeightAverage",),
    "deltasam.step.batches": ("MicroBatches",),
    "deltasam.step.radius": ("LossBudget", "LossShare", "Relative", "Layerwise", "Scheduled"),
    "deltasam.step.selection": ("select",),
    "deltasam.step.precision": ("measured_arrival",),
    "deltasam.per_instance": ("instance_adversarial_losses", "instance_gradient_norms", "perturbed_instances"),
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from deltasam.methods import ASAM as ASAM
    from deltasam.methods import AWP as AWP
    from deltasam.methods import ERM as ERM
    from deltasam.methods import ESAM as ESAM
    from deltasam.methods import GSAM as GSAM
    from deltasam.methods import RWSAM as RWSAM
    from deltasam.methods import SAM as SAM
    from deltasam.methods import TAT as TAT
    from deltasam.methods import TAVAT as TAVAT
    from deltasam.methods import TRAM as TRAM
    from deltasam.methods import WSAM as WSAM
    from deltasam.methods import BiLoRA as BiLoRA
    from deltasam.methods import DeltaSAM as DeltaSAM
    from deltasam.methods import FisherSAM as FisherSAM
    from deltasam.methods import FreeLB as FreeLB
    from deltasam.methods import FriendlySAM as FriendlySAM
    from deltasam.methods import FunctionalSAM as FunctionalSAM
    from deltasam.methods import GradientNormPenalty as GradientNormPenalty
    from deltasam.methods import LookSAM as LookSAM
    from deltasam.methods import Method as Method
    from deltasam.methods import MomentumSAM as MomentumSAM
    from deltasam.methods import MultiStepSAM as MultiStepSAM
    from deltasam.methods import PerInstanceSAM as PerInstanceSAM
    from deltasam.methods import RandomPerturbation as RandomPerturbation
    from deltasam.methods import Step as Step
    from deltasam.methods import SubsetSAM as SubsetSAM
    from deltasam.objectives import DPO as DPO
    from deltasam.objectives import R3F as R3F
    from deltasam.objectives import SMART as SMART
    from deltasam.objectives import VAT as VAT
    from deltasam.objectives import CausalLM as CausalLM
    from deltasam.objectives import Classification as Classification
    from deltasam.objectives import Contrastive as Contrastive
    from deltasam.objectives import EmbeddingNoise as EmbeddingNoise
    from deltasam.objectives import LabelSmoothing as LabelSmoothing
    from deltasam.objectives import NEFTune as NEFTune
    from deltasam.objectives import Objective as Objective
    from deltasam.objectives import PackedCausalLM as PackedCausalLM
    from deltasam.objectives import RDrop as RDrop
    from deltasam.objectives import Regression as Regression
    from deltasam.objectives import Seq2Seq as Seq2Seq
    from deltasam.objectives import Tokens as Tokens
    from deltasam.per_instance import instance_adversarial_losses as instance_adversarial_losses
    from deltasam.per_instance import instance_gradient_norms as instance_gradient_norms
    from deltasam.per_instance import perturbed_instances as perturbed_instances
    from deltasam.step.averaging import WeightAverage as WeightAverage
    from deltasam.step.batches import MicroBatches as MicroBatches
    from deltasam.step.precision import measured_arrival as measured_arrival
    from deltasam.step.radius import Layerwise as Layerwise
    from deltasam.step.radius import LossBudget as LossBudget
    from deltasam.step.radius import LossShare as LossShare
    from deltasam.step.radius import Relative as Relative
    from deltasam.step.radius import Scheduled as Scheduled
    from deltasam.step.selection import select as select
    from deltasam.weighting import Directional as Directional
    from deltasam.weighting import FiniteDifference as FiniteDifference
    from deltasam.weighting import LossWeights as LossWeights
    from deltasam.weighting import NormWeights as NormWeights
    from deltasam.weighting import OwnGradient as OwnGradient
    from deltasam.weighting import RandomWeights as RandomWeights
    from deltasam.weighting import Uniform as Uniform
    from deltasam.weighting import Weighting as Weighting


# Modules that the documentation of 0.1 showed, and their new places. The old paths work until version 0.3.
_MOVED = {
    "batches": "step.batches",
    "bench": "lab.bench",
    "capture": "speed.capture",
    "cli": "lab.cli",
    "compiling": "speed.compiling",
    "experiments": "lab.experiments",
    "instances": "per_instance",
    "passes": "step.passes",
    "plugins": "lab.plugins",
    "precision": "step.precision",
    "randomness": "step.randomness",
    "report": "lab.report",
    "splitting": "speed.splitting",
    "tasks": "lab.tasks",
}


class _MovedModules(MetaPathFinder, Loader):
    """Imports a module under its path of 0.1, with a warning that names the new one."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        return ModuleSpec(name, self) if package == "deltasam" and rest.split(".")[0] in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> Any:
        old, _, rest = spec.name.removeprefix("deltasam.").partition(".")
        new = ".".join(filter(None, ("deltasam", _MOVED[old], rest)))
        new = new.replace("lab.experiments.sweeps", "lab.sweeps")
        warnings.warn(f"{spec.name} is now {new}; the old path works until version 0.3", DeprecationWarning, 2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        # The import system has put the spec of the old path here.
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _MovedModules())  # before leftovers of the old folders, which are namespace packages


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltasam' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
