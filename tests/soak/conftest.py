"""The tiny model for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import save_llama


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("soak-model"))
