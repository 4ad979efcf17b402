"""Where a model's files are: a local folder, the packaged demo models, the Hugging Face Hub, or ModelScope."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.gguf.folder import folder_of, gguf_files
from vllm.logger import init_logger

__all__ = ["PACKAGED_MODELS", "copy_small_files", "downloads_nothing", "is_local", "resolve"]

logger = init_logger(__name__)

PACKAGED_MODELS = ("demo", "demo-draft")
_ASSETS = Path(__file__).resolve().parent.parent / "assets"

# Everything but weights. Python files are fetched only when the caller trusts them.
_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.vocab", "*.spm")
# load_format -> weight files to fetch; the first alternative that the repository has is taken.
_WEIGHT_FILES: dict[str, tuple[tuple[str, ...], ...]] = {
    "auto": (("*.safetensors",), ("*.bin",), ("*.pt",), ("*.gguf",)),
    "safetensors": (("*.safetensors",),),
    "pt": (("*.bin",), ("*.pt",)),
    "npcache": (("*.bin",),),
    "bitsandbytes": (("*.safetensors",), ("*.bin",)),
    "sharded_state": (("*.safetensors",),),
    "gguf": (("*.gguf",),),
    "tensorizer": (),
    "dummy": (),
}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".pth", ".npy", ".tensors")
_DEFAULT_IGNORED = ("original/**/*", "original/*")
_REPO_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPO_ID = re.compile(rf"{_REPO_PART}(?:/{_REPO_PART})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")


def resolve(
    name: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    ignore_patterns: str | Sequence[str] | None = None,
    hf_token: bool | str | None = None,
    trust_remote_code: bool = False,
    what: str = "model",
) -> Path:
    """The local folder that holds `name`, downloaded first if it is not on this machine.

    name:           a folder, "demo" / "demo-draft" (packaged; write "./demo" for a folder of that name), or the id of a
                    repository such as "facebook/opt-125m".
    revision:       branch, tag or commit; every file comes from the one commit it stands for.
    load_format:    decides which weight files are fetched; "dummy" fetches none (also right for a tokenizer).
    what:           the word for `name` in errors.

    Raises ValueError that says what was tried and what to do.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"The {what} must be a folder or a repository id such as 'facebook/opt-125m', got {name!r}.")
    if "\0" in name:
        raise ValueError(f"The {what} name {name!r} contains a NUL character.")
    if name in PACKAGED_MODELS:
        return _packaged(name)
    folder = Path(name).expanduser()
    if _exists(folder):
        return _local(folder, what)
    _check_repo_id(name, folder, what)
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ValueError(f"The {what} revision must be a branch, a tag or a commit id, got {revision!r}.")
    ignored = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or _DEFAULT_IGNORED)
    small = [*_SMALL_FILES, *(["*.py"] if trust_remote_code else [])]
    weights = _WEIGHT_FILES.get(load_format, _WEIGHT_FILES["auto"])
    if envs.VLLM_USE_MODELSCOPE:
        patterns = [*small, *(pattern for alternative in weights for pattern in alternative)]
        return _from_modelscope(name, revision, download_dir, patterns, ignored)
    return _from_hub(name, revision, download_dir, small, weights, ignored, hf_token, what)


def is_local(name: str) -> bool:
    """Whether a model is on this machine already: a folder, a file, or a packaged one."""
    return name in PACKAGED_MODELS or _exists(Path(name).expanduser())


def downloads_nothing(config: Any) -> str:
    """For `idle` of settings of downloads: why there are none."""
    model = config.model_config
    names = (model.model, model.tokenizer, model.hf_config_path or model.model)
    return "nothing is downloaded, the model is on this machine" if all(map(is_local, names)) else ""


def copy_small_files(source: Path, target: Path) -> None:
    """Copy what is no weights from one model folder to another: its config, its tokenizer, folders."""
    ignored = shutil.ignore_patterns(*(f"*{suffix}" for suffix in _WEIGHTS))
    for file in source.iterdir():
        if file.is_dir():
            is_own = target.resolve().is_relative_to(file.resolve())
            if not is_own and file.name not in ("np", "__pycache__") and not file.name.startswith("."):
                shutil.copytree(file, target / file.name, ignore=ignored, dirs_exist_ok=True)
        elif file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # a name too long for a path is not a path
        return False


def _packaged(name: str) -> Path:
    folder = _ASSETS / name
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"The packaged model '{name}' is missing from this installation (looked in {folder}). "
            "Reinstall the package, or name another model."
        )
    return folder


def _local(folder: Path, what: str) -> Path:
    if not folder.is_dir():
        if folder.suffix == ".gguf":
            return folder_of(folder)
        raise ValueError(
            f"The {what} {str(folder)!r} is a file, expected a folder in Hugging Face format "
            "(config.json, weights, tokenizer) or a GGUF file. Name the folder that holds the file."
        )
    if not (folder / "config.json").exists():
        models = gguf_files(folder)
        if len(models) > 1:
            names = ", ".join(model.name for model in models)
            raise ValueError(f"The {what} folder {str(folder)!r} holds several GGUF models: {names}. Name one of them.")
        if models:
            return folder_of(models[0])
    return folder.resolve()


def _check_repo_id(name: str, folder: Path, what: str) -> None:
    """Refuse what can only be a path that does not exist, and anything that is no repository id."""
    if "://" in name:
        raise ValueError(
            f"The {what} {name!r} is an address. Name the repository alone, such as 'facebook/opt-125m', or a folder."
        )
    if name.startswith(("/", ".", "~", "\\")) or name.count("/") > 1 or "\\" in name:
        raise ValueError(
            f"The {what} folder {name!r} does not exist (looked at {folder.absolute()}). "
            "Check the path; a repository is named 'owner/name', without a leading slash or dot."
        )
    if not _REPO_ID.fullmatch(name) or ".." in name or "--" in name:
        raise ValueError(
            f"{name!r} is neither an existing folder nor a valid repository id for the {what}. A repository id is "
            "'name' or 'owner/name', with letters, digits, '-', '_' and '.' only, and no '..' or '--'."
        )


def _from_hub(
    name: str,
    revision: str | None,
    download_dir: str | None,
    small: list[str],
    weights: tuple[tuple[str, ...], ...],
    ignored: list[str],
    token: bool | str | None,
    what: str,
) -> Path:
    import huggingface_hub
    from huggingface_hub import constants

    where: dict[str, Any] = {"repo_id": name, "cache_dir": download_dir, "token": token}
    if constants.HF_HUB_OFFLINE:
        return _from_cache(where, revision, what, "HF_HUB_OFFLINE is set, so the Hub was not asked")
    try:
        # One question gives the commit and the file list; every file is then taken from that commit.
        info = huggingface_hub.HfApi().model_info(name, revision=revision, token=token, timeout=30)
    except Exception as error:  # every release of huggingface_hub has another HTTP client, with its own errors
        if _is_final(error):
            raise ValueError(_hub_refusal(name, revision, what, error)) from None
        return _from_cache(where, revision, what, f"the Hub could not be reached ({_one_line(error)})")
    files = [file.rfilename for file in info.siblings or []]
    patterns = [*small, *_pick_weights(files, weights)]
    if "model.safetensors" in files or "model.safetensors.index.json" in files:
        ignored = [*ignored, "consolidated*"]  # the same weights once more, in another layout
    try:
        folder = huggingface_hub.snapshot_download(
            **where, revision=info.sha or revision, allow_patterns=patterns, ignore_patterns=ignored
        )
    except Exception as error:
        raise ValueError(
            f"Downloading the {what} {name!r} failed: {_one_line(error)}. Check the connection and the free disk "
            "space, then try again; files that are complete are not fetched twice."
        ) from None
    return Path(folder)


def _pick_weights(files: Sequence[str], alternatives: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    for patterns in alternatives:
        if any(fnmatch.fnmatch(file, pattern) for file in files for pattern in patterns):
            return patterns
    return ()


def _from_cache(where: dict[str, Any], revision: str | None, what: str, reason: str) -> Path:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(**where, revision=revision, local_files_only=True)
    except Exception:
        name = where["repo_id"]
        tried = f"folder {Path(name).absolute()}; download cache ({where['cache_dir'] or 'the default one'})"
        raise ValueError(
            f"The {what} {name!r} was not found. Tried: {tried}; {reason}. Connect to the Hub, or download the "
            "repository elsewhere and pass the path of its folder, or use model='demo', which comes with the package."
        ) from None
    logger.warning("Using the cached copy of %s because %s.", where["repo_id"], reason)
    return Path(folder)


def _is_final(error: Exception) -> bool:
    """Whether the Hub answered, and the answer was no."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError)


def _hub_refusal(name: str, revision: str | None, what: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return f"The {what} {name!r} is gated. Ask for access on its page, then set HF_TOKEN or pass hf_token."
    if isinstance(error, RevisionNotFoundError):
        return f"The {what} {name!r} has no revision {revision!r}. Use a branch, tag or commit id of the repository."
    return (
        f"The {what} {name!r} is neither a folder here (looked at {Path(name).absolute()}) nor a repository that the "
        "Hub shows you. Check the name; for a private repository set HF_TOKEN or pass hf_token."
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _from_modelscope(
    name: str, revision: str | None, download_dir: str | None, patterns: list[str], ignored: list[str]
) -> Path:
    try:
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError:
        raise ValueError(
            "VLLM_USE_MODELSCOPE is set, but the package `modelscope` is not installed. "
            "Run `pip install modelscope`, or unset VLLM_USE_MODELSCOPE to use the Hugging Face Hub."
        ) from None
    folder = snapshot_download(
        model_id=name,
        cache_dir=download_dir,
        revision=revision,
        allow_file_pattern=patterns,
        ignore_file_pattern=ignored,
    )
    return Path(folder)
