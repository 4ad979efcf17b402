"""Names of models become folders: local ones, packaged ones, and downloads that are pinned to one commit."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from vllm.config import model_source
from vllm.config.model_source import resolve


class Hub:
    """A hub with one repository; remembers what it was asked for."""

    def __init__(self, folder: Path, files: list[str], error: Exception | None = None, cached: bool = False) -> None:
        self.folder, self.files, self.error, self.cached = folder, files, error, cached
        self.asked: list[dict[str, Any]] = []
        self.downloads: list[dict[str, Any]] = []

    def model_info(self, name: str, **kwargs: Any) -> Any:
        self.asked.append({"name": name, **kwargs})
        if self.error is not None:
            raise self.error
        siblings = [types.SimpleNamespace(rfilename=file) for file in self.files]
        return types.SimpleNamespace(sha="c0ffee" * 6 + "beef", siblings=siblings)

    def snapshot_download(self, **kwargs: Any) -> str:
        self.downloads.append(kwargs)
        if kwargs.get("local_files_only") and not self.cached:
            raise LocalEntryNotFoundError("not in the cache")
        return str(self.folder)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(hub: Hub, offline: bool = False) -> Hub:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        return hub

    return install


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    assert resolve(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == tmp_path / "model"
    assert resolve("./model") == tmp_path / "model"


def test_packaged_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    monkeypatch.setattr(model_source, "_ASSETS", tmp_path)
    assert resolve("demo") == tmp_path / "demo"
    assert resolve("demo", what="tokenizer", load_format="dummy") == tmp_path / "demo"
    with pytest.raises(ValueError, match="packaged model 'demo-draft' is missing from this installation"):
        resolve("demo-draft")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    for name, message in [
        ("model.bin", "is a file, expected a folder in Hugging Face format"),
        ("model.gguf", "is not a GGUF file: it has 0 bytes only"),
    ]:
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=message):
            resolve(str(tmp_path / name))


def test_an_address_is_no_name(use: Any, tmp_path: Path) -> None:
    hub = use(Hub(tmp_path, []))
    with pytest.raises(ValueError, match="is an address. Name the repository alone, such as 'facebook/opt-125m'"):
        resolve("https://huggingface.co/facebook/opt-125m")
    assert hub.asked == []


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nothing", "../nothing", "~/nothing-here", "a/b/c", "a\\b", "..", "."]
)
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str, use: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    hub = use(Hub(tmp_path, []))
    if Path(name).exists():
        assert resolve(name).is_dir()
    else:
        with pytest.raises(ValueError, match="does not exist .looked at /"):
            resolve(name)
    assert hub.asked == []


@pytest.mark.parametrize("name", ["a b", "a..b", "a--b", "owner/", "/", "o/n?x=1", "o/n#", "o/%2e%2e", "-x", "x" * 5000,
                                  "http://h/x", "owner/na\nme", "", "  ", "a\0b", 5, None])  # fmt: skip
def test_names_that_are_no_repository_are_refused(name: Any, use: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    hub = use(Hub(tmp_path, []))
    if name == "/":
        assert resolve(name) == Path("/")
        return
    with pytest.raises(ValueError):
        resolve(name)
    assert hub.asked == []


@pytest.mark.parametrize("revision", ["../main", "-r", "a b", "", "x" * 300])
def test_a_revision_is_a_branch_tag_or_commit(revision: str, use: Any, tmp_path: Path) -> None:
    hub = use(Hub(tmp_path, []))
    with pytest.raises(ValueError, match="revision must be a branch, a tag or a commit"):
        resolve("owner/name", revision=revision)
    assert hub.asked == []


def test_every_file_comes_from_the_commit_that_the_revision_stands_for(use: Any, tmp_path: Path) -> None:
    hub = use(Hub(tmp_path, ["config.json", "model.safetensors", "pytorch_model.bin", "consolidated.safetensors"]))
    folder = resolve("owner/name", revision="v1", download_dir="/cache", hf_token="t")
    assert folder == tmp_path
    assert hub.asked == [{"name": "owner/name", "revision": "v1", "token": "t", "timeout": 30}]
    (download,) = hub.downloads
    assert download["revision"] == "c0ffee" * 6 + "beef"
    assert (download["cache_dir"], download["token"]) == ("/cache", "t")
    assert "*.safetensors" in download["allow_patterns"]
    assert "*.bin" not in download["allow_patterns"]
    assert "consolidated*" in download["ignore_patterns"]
    assert "original/**/*" in download["ignore_patterns"]


@pytest.mark.parametrize(
    ("load_format", "files", "wanted"),
    [
        ("auto", ["pytorch_model.bin"], {"*.bin"}),
        ("auto", ["consolidated.00.pt"], {"*.pt"}),
        ("auto", ["a.safetensors", "b.bin"], {"*.safetensors"}),
        ("pt", ["a.safetensors", "b.bin"], {"*.bin"}),
        ("safetensors", ["b.bin"], set()),
        ("dummy", ["a.safetensors", "b.bin"], set()),
    ],
)
def test_only_the_weights_of_the_load_format_are_fetched(
    use: Any, tmp_path: Path, load_format: str, files: list[str], wanted: set[str]
) -> None:
    hub = use(Hub(tmp_path, files))
    resolve("owner/name", load_format=load_format)
    patterns = set(hub.downloads[0]["allow_patterns"])
    assert patterns & {"*.bin", "*.pt", "*.safetensors"} == wanted
    assert {"*.json", "*.model", "*.txt"} <= patterns


@pytest.mark.parametrize("trust", [True, False])
def test_python_files_are_fetched_only_with_trust(use: Any, tmp_path: Path, trust: bool) -> None:
    hub = use(Hub(tmp_path, ["modeling.py"]))
    resolve("owner/name", trust_remote_code=trust)
    assert ("*.py" in hub.downloads[0]["allow_patterns"]) == trust


def test_ignore_patterns_replace_the_default(use: Any, tmp_path: Path) -> None:
    hub = use(Hub(tmp_path, []))
    resolve("owner/name", ignore_patterns="a*")
    resolve("owner/name", ignore_patterns=["a*", "b*"])
    assert [d["ignore_patterns"] for d in hub.downloads] == [["a*"], ["a*", "b*"]]


def test_an_unreachable_hub_falls_back_to_the_cache(use: Any, tmp_path: Path) -> None:
    hub = use(Hub(tmp_path, [], ConnectionError("no route"), cached=True))
    assert resolve("owner/name", revision="v1") == tmp_path
    assert hub.downloads[0]["local_files_only"] is True
    assert hub.downloads[0]["revision"] == "v1"


def test_an_unreachable_hub_without_a_cached_copy_says_what_was_tried(use: Any, tmp_path: Path) -> None:
    use(Hub(tmp_path, [], ConnectionError("no route")))
    with pytest.raises(ValueError) as error:
        resolve("owner/name", download_dir="/cache")
    text = str(error.value)
    for part in ("'owner/name' was not found", "download cache (/cache)", "could not be reached", "no route", "'demo'"):
        assert part in text


def test_offline_mode_asks_nobody(use: Any, tmp_path: Path) -> None:
    hub = use(Hub(tmp_path, [], cached=True), offline=True)
    assert resolve("owner/name") == tmp_path
    assert hub.asked == []
    hub.cached = False
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        resolve("owner/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", "nor a repository that the Hub shows you"),
        ("GatedRepoError", "is gated. Ask for access"),
        ("RevisionNotFoundError", "has no revision 'v1'"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(use: Any, tmp_path: Path, error: str, message: str) -> None:
    cls = getattr(huggingface_hub.errors, error)
    hub = use(Hub(tmp_path, [], cls.__new__(cls), cached=True))
    with pytest.raises(ValueError, match=message):
        resolve("owner/name", revision="v1")
    assert hub.downloads == []  # a cached copy must not hide the answer


def test_a_broken_download_says_what_to_do(use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Hub(tmp_path, []))

    def full_disk(**kwargs: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full_disk)
    with pytest.raises(
        ValueError, match="Downloading the model 'owner/name' failed: OSError.*No space left.*try again"
    ):
        resolve("owner/name")


def test_modelscope_is_used_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ValueError, match="`modelscope` is not installed. Run `pip install modelscope`"):
        resolve("owner/name")
    asked: list[dict[str, Any]] = []

    def snapshot_download(**kwargs: Any) -> str:
        asked.append(kwargs)
        return str(tmp_path)

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        module = types.ModuleType(name)
        module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    assert resolve("owner/name", revision="v2", download_dir="/d") == tmp_path
    assert (asked[0]["model_id"], asked[0]["revision"], asked[0]["cache_dir"]) == ("owner/name", "v2", "/d")
