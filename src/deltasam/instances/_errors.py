"""Why a model has no exact low-rank perturbation, or none at all."""

from __future__ import annotations


class InstancesMixedError(ValueError):
    """The loss of one instance depends on other instances, so "per instance" is not defined."""


class UncoveredError(NotImplementedError):
    """Parameters are used in a way that no rule of the low-rank engine covers; the loop engine covers every model."""

    def __init__(self, message: str, parameters: list[str]) -> None:
        super().__init__(message)
        self.parameters = parameters


class NoRuleError(RuntimeError):
    """An operation could not be carried out for every instance; carries what is needed to say so."""

    def __init__(self, operation: str, parameters: list[str]) -> None:
        super().__init__(operation)
        self.operation = operation
        self.parameters = parameters


class MisreadError(ValueError):
    """The pass has to be made again: where the instances are was not as assumed."""

    def __init__(self, message: str, learned_size: int | None = None, *, of_the_losses: bool = False) -> None:
        super().__init__(message)
        self.learned_size = learned_size
        self.of_the_losses = of_the_losses  # there are not as many as instances


class SizeUnknownError(ValueError):
    """How many instances there are cannot be seen: whoever calls the engine has to say."""


class ModelError(Exception):
    """Carries an error of the model or the objective, which came up without any proxies, past the engine's doubts."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SuspectedMixError(ValueError):
    """The engine sees a loss depend on rows of other instances; or it has misread which rows those are."""

    def __init__(self, size: int, members: slice) -> None:
        super().__init__("the loss of one instance depends on the other instances of the batch")
        self.size = size
        self.members = members
