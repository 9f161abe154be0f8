"""Where devices are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_opt.system.devices import pci_address


@pytest.mark.parametrize(
    ("properties", "address"),
    [
        (SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0), "0000:3b:00.0"),
        (SimpleNamespace(pci_domain_id=0x10001, pci_bus_id=1, pci_device_id=31), "10001:01:1f.0"),
        (SimpleNamespace(pci_bus_id="0000:3b:00.0"), None),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_an_address_as_the_system_has_it(properties: Any, address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert pci_address(0) is None
    module = SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert pci_address(0) == address
