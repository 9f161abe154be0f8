"""Policies are values: frozen, comparable, checked when they are made, and they say what was wrong."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zero_opt import (
    AlreadyReduced,
    AtStep,
    Checks,
    ConfigConflict,
    ConfigError,
    ConfigTypeError,
    CPUOffload,
    MixedPrecision,
    NVMeOffload,
    Overlapped,
    Selective,
    WorkerOffload,
)

ALL = [Overlapped, AtStep, AlreadyReduced, MixedPrecision, Checks, CPUOffload, WorkerOffload]
BUCKETED = [Overlapped, AtStep]
every_policy = pytest.mark.parametrize("policy", ALL)


@every_policy
def test_a_policy_is_a_frozen_value(policy: type[Any]) -> None:
    made = policy()
    assert made == policy()
    assert hash(made) == hash(policy())
    assert pickle.loads(pickle.dumps(made)) == made
    assert repr(made) == repr(policy()), "ranks compare policies by their repr"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, None)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (lambda: Overlapped(bucket_mb=np.int8(100)), Overlapped(bucket_mb=100)),
        (lambda: AtStep(bucket_mb=np.float32(0.25)), AtStep(bucket_mb=0.25)),
        (lambda: CPUOffload(ratio=np.float64(0.5), threads=np.int64(2)), CPUOffload(ratio=0.5, threads=2)),
        (lambda: WorkerOffload(delay=np.int32(1), cores=(np.int64(0),)), WorkerOffload(delay=1, cores=(0,))),
        (lambda: NVMeOffload(".", window_mb=np.int16(64)), NVMeOffload(".", window_mb=64)),
        (lambda: Selective(topk_ratio=np.float32(0.5)), Selective(topk_ratio=0.5)),
        (lambda: Checks(timeout=np.float32(4)), Checks(timeout=4.0)),
    ],
)
def test_numpys_numbers_are_kept_as_pythons_own(given: Callable[[], Any], plain: Any) -> None:
    assert repr(given()) == repr(plain), "ranks compare policies by their repr"


@pytest.mark.parametrize("policy", [*ALL, NVMeOffload])
def test_every_field_is_documented(policy: type[Any]) -> None:
    for field in dataclasses.fields(policy):
        assert re.search(rf"\b{field.name}\b.*:", policy.__doc__ or "")


@pytest.mark.parametrize("policy", BUCKETED)
@pytest.mark.parametrize("value", [0.25, 25, 10**6])
def test_bucket_sizes_that_work(policy: type[Any], value: float) -> None:
    assert policy(bucket_mb=value).bucket_mb == value


@pytest.mark.parametrize("policy", BUCKETED)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_a_bucket_size_that_cannot_work_is_quoted(policy: type[Any], value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{policy.__name__}\.bucket_mb must be positive and finite, got {value!r}"):
        policy(bucket_mb=value)


def test_sizes_that_no_memory_has_are_quoted() -> None:
    for field, policy in (
        ("Overlapped.bucket_mb", lambda value: Overlapped(bucket_mb=value)),
        ("CPUOffload.subgroup_mb", lambda value: CPUOffload(subgroup_mb=value)),
        ("NVMeOffload.window_mb", lambda value: NVMeOffload(".", window_mb=value)),
    ):
        policy(2**43 - 1)
        for value in (2**43, 1e305):
            with pytest.raises(ConfigError, match=rf"{field} is in MiB and must be less than 8796093022208, got"):
                policy(value)


@pytest.mark.parametrize("policy", BUCKETED)
@pytest.mark.parametrize("value", ["25", True])
def test_a_bucket_size_of_a_wrong_type_is_quoted(policy: type[Any], value: object) -> None:
    with pytest.raises(ConfigTypeError, match=rf"{policy.__name__}\.bucket_mb must be a number, got {value!r}"):
        policy(bucket_mb=value)


@pytest.mark.parametrize("policy", [*BUCKETED, AlreadyReduced])
def test_exchange_is_one_of_the_known(policy: type[Any]) -> None:
    assert policy(exchange="backend").exchange == "backend"
    with pytest.raises(ConfigError, match=rf"{policy.__name__}\.exchange must be one of .*'auto'.*, got 'tcp'"):
        policy(exchange="tcp")


SECONDS: dict[str, Callable[[Any], Any]] = {
    "Checks.timeout": lambda value: Checks(timeout=value),
    "Checks.hang_timeout": lambda value: Checks(hang_timeout=value),
    "WorkerOffload.hang_timeout": lambda value: WorkerOffload(hang_timeout=value),
    "NVMeOffload.hang_timeout": lambda value: NVMeOffload(".", hang_timeout=value),
}


@pytest.mark.parametrize("field", SECONDS)
def test_seconds_that_nobody_can_wait_are_refused(field: str) -> None:
    for value in (0, 0.0, -1, -math.inf, math.inf, math.nan, 10**400, 10**5000):
        with pytest.raises(ConfigError, match=rf"{field} must be positive and finite, got"):
            SECONDS[field](value)
    # A backend counts milliseconds, of which 0 is no limit at all to it.
    for value in (1e-9, 0.000999):
        with pytest.raises(ConfigError, match=rf"{field} is in seconds and must be at least 0.001, got"):
            SECONDS[field](value)
    for value in ("30s", None, True) if field != "Checks.timeout" else ("30s", True):
        with pytest.raises(ConfigTypeError, match=rf"{field} must be a number, got"):
            SECONDS[field](value)
    for value in (0.001, 10, 1e12, 10**300):
        assert SECONDS[field](value) == SECONDS[field](value)


def test_timeouts() -> None:
    assert Checks(timeout=1.5).timeout == 1.5
    with pytest.raises(ConfigError, match=r"Checks\.timeout must be positive and finite, got 0"):
        Checks(timeout=0)
    with pytest.raises(ConfigTypeError, match=r"Checks\.timeout must be a number, got '30s'"):
        Checks(timeout="30s")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_reduce_dtypes_that_work(dtype: torch.dtype | None) -> None:
    assert MixedPrecision(reduce_dtype=dtype).reduce_dtype is dtype


def test_a_reduce_dtype_that_cannot_work_is_quoted() -> None:
    with pytest.raises(ConfigTypeError, match=r"MixedPrecision\.reduce_dtype must be a torch\.dtype, got 'bf16'"):
        MixedPrecision(reduce_dtype="bf16")  # type: ignore[arg-type]
    for dtype in (torch.int32, torch.complex64, torch.float8_e5m2):
        with pytest.raises(ConfigError, match=rf"MixedPrecision\.reduce_dtype must be floating-point.*got {dtype}"):
            MixedPrecision(reduce_dtype=dtype)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_fp32_gradients_can_be_bf16_between_hosts(reduce_dtype: torch.dtype | None) -> None:
    precision = MixedPrecision(reduce_dtype=reduce_dtype, between_hosts_dtype=torch.bfloat16)
    assert precision.between_hosts_dtype is torch.bfloat16


def test_what_gradients_cannot_be_between_hosts() -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        with pytest.raises(ConfigError, match=rf"between_hosts_dtype must be torch\.bfloat16.*got {dtype}"):
            MixedPrecision(between_hosts_dtype=dtype)
    with pytest.raises(ConfigTypeError, match=r"between_hosts_dtype must be a torch\.dtype, got 'bf16'"):
        MixedPrecision(between_hosts_dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(ConfigConflict, match=r"reduce_dtype=torch\.bfloat16 sends none"):
        MixedPrecision(reduce_dtype=torch.bfloat16, between_hosts_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("delay", [2, -1]),
        ("threads", [0, -3, 1025]),
        ("cores", [(), (1, 1), (-1,)]),
        ("hang_timeout", [0, math.inf]),
        ("max_deaths", [0]),
    ],
)
def test_worker_options_that_cannot_work_are_quoted(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"WorkerOffload\.{field} .*{re.escape(repr(value).strip('(),'))}"):
            WorkerOffload(**{field: value})
    with pytest.raises(ConfigTypeError, match=rf"WorkerOffload\.{field} must be .*, got '1'"):
        WorkerOffload(**{field: "1"})


def test_a_worker_speculates_or_delays() -> None:
    policies = (WorkerOffload(), WorkerOffload(1), WorkerOffload(speculate=True))
    assert [policy.steps_in_background for policy in policies] == [False, True, True]
    with pytest.raises(ConfigConflict, match="use one of the two"):
        WorkerOffload(delay=1, speculate=True)
    with pytest.raises(ConfigConflict, match="needs the gradients of every step, which selective makes wait"):
        WorkerOffload(speculate=True, selective=Selective())
    with pytest.raises(ConfigTypeError, match="speculate must be True or False, got 1"):
        WorkerOffload(speculate=1)  # type: ignore[arg-type]


def test_worker_cores_may_differ_between_ranks() -> None:
    one, other = WorkerOffload(cores=[0, 2]), WorkerOffload(cores=range(4))  # type: ignore[arg-type]
    assert (one.cores, other.cores) == ((0, 2), (0, 1, 2, 3))
    assert repr(one) == repr(other) == repr(WorkerOffload())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("path", ["", "\0", "\ud800"]),
        ("window_mb", [0, math.inf]),
        ("threads", [0, 1025]),
        ("hang_timeout", [-1, math.nan]),
    ],
)
def test_options_of_a_file_that_cannot_work_are_quoted(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"NVMeOffload\.{field} must be .*{re.escape(repr(value))}"):
            NVMeOffload(**{"path": "/", field: value})
    with pytest.raises(ConfigTypeError, match=rf"NVMeOffload\.{field} must be .*, got \[\]"):
        NVMeOffload(**{"path": "/", field: []})


def test_the_directory_of_a_file_may_differ_between_ranks() -> None:
    made = NVMeOffload("/a", window_mb=8)
    assert made == NVMeOffload("/a", window_mb=8)
    assert pickle.loads(pickle.dumps(made)) == made
    assert repr(made) == repr(NVMeOffload(Path("/b"), window_mb=8)) != repr(NVMeOffload("/a"))


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("ratio", 0, ConfigError),
        ("ratio", 1.5, ConfigError),
        ("ratio", "half", ConfigTypeError),
        ("subgroup_mb", -1, ConfigError),
        ("threads", 0, ConfigError),
        ("threads", 1025, ConfigError),
        ("threads", "two", ConfigTypeError),
        ("threads", True, ConfigTypeError),
        ("pin_memory", 1, ConfigTypeError),
    ],
)
def test_what_cannot_be_offloaded_is_quoted(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"CPUOffload\.{field} must be .*, got {value!r}"):
        CPUOffload(**{field: value})


@pytest.mark.parametrize(
    ("value", "error"),
    [("float32", ConfigError), (torch.float64, ConfigError), (32, ConfigTypeError), (torch.int16, ConfigError)],
)
def test_a_master_that_cannot_be_is_quoted(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"MixedPrecision\.master_dtype must be .*, got {re.escape(repr(value))}"):
        MixedPrecision(value)
    with pytest.raises(ConfigError, match=r"MixedPrecision\.accumulate_dtype must be floating-point"):
        MixedPrecision(accumulate_dtype=torch.int32)
