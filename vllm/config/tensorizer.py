"""Settings of load_format="tensorizer"."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

_RANK = re.compile(r"%0?\d*d")


@dataclass
class TensorizerConfig:
    """Where tensorized weights are and how they are read: `model_loader_extra_config` of load_format="tensorizer".

    tensorizer_uri: a file, an address (http, https) or s3://..., with %03d or the like for the rank's number where
        there are several.
    vllm_tensorized: of older versions; files tell by themselves.
    verify_hash: compare each tensor with the hash in the file.   num_readers: parallel reads, 1 by default.
    encryption_keyfile: the key of an encrypted file.
    s3_...: by default the variables S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY and S3_ENDPOINT_URL.
    """

    tensorizer_uri: str
    vllm_tensorized: bool | None = False
    verify_hash: bool | None = False
    num_readers: int | None = None
    encryption_keyfile: str | None = None
    s3_access_key_id: str | None = None
    s3_secret_access_key: str | None = None
    s3_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tensorizer_uri, str) or not self.tensorizer_uri:
            raise ValueError(f"tensorizer_uri must name a file or an address, got {self.tensorizer_uri!r}.")
        if self.num_readers is not None and (not isinstance(self.num_readers, int) or self.num_readers < 1):
            raise ValueError(f"num_readers must be at least 1, got {self.num_readers!r}.")

    @classmethod
    def of(cls, settings: Any) -> TensorizerConfig:
        """From what a user gave as `model_loader_extra_config`. Raises ValueError that says what is wrong."""
        if isinstance(settings, cls):
            return settings
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown or "tensorizer_uri" not in settings:
            problem = f"has no setting {', '.join(unknown)}" if unknown else "needs tensorizer_uri"
            raise ValueError(
                f"model_loader_extra_config of load_format='tensorizer' {problem}. Its settings: {', '.join(known)}."
            )
        return cls(**settings)

    def to_serializable(self) -> dict[str, Any]:
        """The settings as JSON."""
        return asdict(self)

    def construct_tensorizer_args(self) -> TensorizerArgs:
        """The same as arguments of a command line."""
        return TensorizerArgs(**asdict(self))

    def uri(self, rank: int, world: int) -> str:
        """Where this rank's weights are. Raises ValueError if several ranks would have one file."""
        if _RANK.search(self.tensorizer_uri):
            return self.tensorizer_uri % rank
        if world > 1:
            raise ValueError(
                f"tensorizer_uri={self.tensorizer_uri!r} is one file for {world} ranks, which have one each. Write the "
                "rank's number as %03d, such as model-rank-%03d.tensors."
            )
        return self.tensorizer_uri


@dataclass
class TensorizerArgs(TensorizerConfig):
    """`TensorizerConfig` as arguments of a command line."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each setting."""
        group = parser.add_argument_group("tensorizer options")
        group.add_argument("--tensorizer-uri", help="File, web address or s3:// address, %%03d for the rank's number.")
        group.add_argument("--verify-hash", action="store_true", help="Compare each tensor with its hash.")
        group.add_argument("--num-readers", type=int, help="Parallel reads. Default: 1.")
        group.add_argument("--encryption-keyfile", help="The key of an encrypted file.")
        group.add_argument("--s3-access-key-id", help="Default: S3_ACCESS_KEY_ID.")
        group.add_argument("--s3-secret-access-key", help="Default: S3_SECRET_ACCESS_KEY.")
        group.add_argument("--s3-endpoint", help="Default: S3_ENDPOINT_URL.")
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> TensorizerArgs:
        """From parsed flags."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})
