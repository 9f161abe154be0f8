"""Typed errors: one family, also of the type torch raises for the same mistake, all public; a category of warnings."""

from __future__ import annotations

import inspect
import pickle

import pytest

import zero_opt
from zero_opt import errors

SECOND_BASE = {
    "ConfigError": ValueError,
    "ConfigTypeError": TypeError,
    "ConfigConflict": RuntimeError,
    "UnsupportedOptimizer": ValueError,
    "UnsupportedParam": TypeError,
    "ProcessGroupError": RuntimeError,
    "GradientConsumed": RuntimeError,
    "GradientConflict": RuntimeError,
    "GradientsLocal": RuntimeError,
    "RankMismatch": RuntimeError,
    "StepDesync": RuntimeError,
    "StepFailed": RuntimeError,
    "ParamsReplaced": RuntimeError,
    "ParamsUnsharded": RuntimeError,
    "PeerLost": RuntimeError,
    "PeerSilent": RuntimeError,
    "NonFiniteGradient": RuntimeError,
    "StateDictError": ValueError,
    "StateDictTypeError": TypeError,
    "StateNotConsolidated": RuntimeError,
    "StateOffloaded": RuntimeError,
    "OptimizerClosed": RuntimeError,
    "NativeUnavailable": RuntimeError,
    "OutOfMemory": MemoryError,
    "OutOfResources": RuntimeError,
    "StepPending": RuntimeError,
    "StorageFailed": OSError,
    "StorageFull": OSError,
    "WorkerDied": RuntimeError,
    "WorkerFailed": RuntimeError,
}
DEFINED = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def test_every_error_is_in_the_table() -> None:
    assert DEFINED.keys() - {"ZeroOptError", "ZeroOptWarning"} == SECOND_BASE.keys()


def test_the_category_of_warnings_is_a_users_warning_and_no_error() -> None:
    assert issubclass(zero_opt.ZeroOptWarning, UserWarning)
    assert not issubclass(zero_opt.ZeroOptWarning, zero_opt.ZeroOptError)


@pytest.mark.parametrize("name", sorted(SECOND_BASE))
def test_an_error_is_ours_and_also_torchs_type(name: str) -> None:
    assert issubclass(DEFINED[name], errors.ZeroOptError)
    assert issubclass(DEFINED[name], SECOND_BASE[name])


@pytest.mark.parametrize("name", sorted(DEFINED))
def test_an_error_is_public_documented_and_can_be_pickled(name: str) -> None:
    kind = DEFINED[name]
    assert name in zero_opt.__all__
    assert getattr(zero_opt, name) is kind
    assert inspect.getdoc(kind)
    copy = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(copy) is kind
    assert str(copy) == "what happened"


def test_desync_carries_the_epoch_to_continue_from() -> None:
    assert errors.StepDesync("x", epoch=3).epoch == 3
    assert errors.StepDesync("x").epoch is None


def test_the_public_names_exist_and_are_sorted() -> None:
    assert zero_opt.__all__ == sorted(zero_opt.__all__)
    assert all(hasattr(zero_opt, name) for name in zero_opt.__all__)
