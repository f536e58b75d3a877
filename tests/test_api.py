"""The public API: each name and each public method says what it gives."""

from __future__ import annotations

import inspect

import pytest

import ddp_prof as dp

PUBLIC = [name for name in dp.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_is_described(name: str) -> None:
    thing = getattr(dp, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        methods = {key: value for key, value in vars(thing).items() if not key.startswith("_") and callable(value)}
        assert [key for key, value in methods.items() if not inspect.getdoc(value)] == []
