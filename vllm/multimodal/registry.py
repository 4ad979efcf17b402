"""`MultiModalRegistry`: the plugin of each modality, and how many items of it a prompt may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.inputs.registry import class_of
from vllm.multimodal.audio import AudioPlugin
from vllm.multimodal.base import InputMapper, MaxTokens, ModelClass, MultiModalInputs, MultiModalPlugin
from vllm.multimodal.image import ImagePlugin

if TYPE_CHECKING:
    from vllm.config import ModelConfig

DEFAULT_PLUGINS: tuple[type[MultiModalPlugin], ...] = (ImagePlugin, AudioPlugin)


class MultiModalRegistry:
    """Hands the data of each modality to its plugin.

    `plugins` are plugins or their classes; classes are instantiated, so that two registries share no state.
    """

    def __init__(self, *, plugins: Sequence[MultiModalPlugin | type[MultiModalPlugin]] = DEFAULT_PLUGINS) -> None:
        self._plugins: dict[str, MultiModalPlugin] = {}
        for plugin in plugins:
            self.register_plugin(plugin() if isinstance(plugin, type) else plugin)

    def register_plugin(self, plugin: MultiModalPlugin) -> None:
        """Make a modality known. Raises ValueError if its key is taken by a plugin of another class."""
        key = plugin.get_data_key()
        present = self._plugins.get(key)
        if present is not None and type(present) is not type(plugin):
            raise ValueError(f"The modality {key!r} already has a plugin, {type(present).__name__}.")
        self._plugins[key] = plugin

    def register_input_mapper(
        self, data_type_key: str, mapper: InputMapper | None = None
    ) -> Callable[[ModelClass], ModelClass]:
        """Class decorator; see `MultiModalPlugin.register_input_mapper`."""
        return self._plugin(data_type_key).register_input_mapper(mapper)

    def register_image_input_mapper(self, mapper: InputMapper | None = None) -> Callable[[ModelClass], ModelClass]:
        """Class decorator for the modality "image"."""
        return self.register_input_mapper("image", mapper)

    def register_max_multimodal_tokens(
        self, data_type_key: str, max_mm_tokens: MaxTokens | None = None
    ) -> Callable[[ModelClass], ModelClass]:
        """Class decorator; see `MultiModalPlugin.register_max_multimodal_tokens`."""
        return self._plugin(data_type_key).register_max_multimodal_tokens(max_mm_tokens)

    def register_max_image_tokens(self, max_mm_tokens: MaxTokens | None = None) -> Callable[[ModelClass], ModelClass]:
        """Class decorator for the modality "image"."""
        return self.register_max_multimodal_tokens("image", max_mm_tokens)

    def map_input(self, model_config: ModelConfig, data: Mapping[str, Any]) -> MultiModalInputs:
        """The model's keyword arguments for all of a prompt's data. Raises ValueError for more items than allowed."""
        limits = self.get_mm_limits_per_prompt(model_config)
        merged = MultiModalInputs()
        for key, items in data.items():
            plugin = self._plugin(key)
            count = len(items) if isinstance(items, list) else 1
            limit = limits.get(key, 0)
            if plugin.serves(class_of(model_config)) and count > limit:
                raise ValueError(
                    f"At most {limit} {key}(s) may be provided in one request. "
                    "You can set `--limit-mm-per-prompt` to increase this limit if the model supports it."
                )
            for name, value in plugin.map_input(model_config, items).items():
                if name in merged:
                    raise ValueError(f"The input mappers of {list(data)} return {name!r} more than once.")
                merged[name] = value
        return merged

    def create_input_mapper(self, model_config: ModelConfig) -> Callable[[Mapping[str, Any]], MultiModalInputs]:
        """`map_input` for one model."""
        return lambda data: self.map_input(model_config, data)

    def get_max_multimodal_tokens(self, model_config: ModelConfig) -> int:
        """The most tokens that the items of one prompt become, over all modalities."""
        limits = self.get_mm_limits_per_prompt(model_config)
        return sum(self._plugin(key).get_max_multimodal_tokens(model_config) * n for key, n in limits.items())

    def init_mm_limits_per_prompt(self, model_config: ModelConfig) -> None:
        """Check the configured limits. Raises ValueError if one names a modality that the model does not take."""
        self.get_mm_limits_per_prompt(model_config)

    def get_mm_limits_per_prompt(self, model_config: ModelConfig) -> Mapping[str, int]:
        """How many items of each modality that the model takes a prompt may have: as configured, else 1."""
        model_class = class_of(model_config)
        served = [key for key, plugin in self._plugins.items() if plugin.serves(model_class)]
        if not served:
            return {}
        given = model_config.get_multimodal_config().limit_mm_per_prompt
        unknown = sorted(set(given) - set(served))
        if unknown:
            raise ValueError(f"limit_mm_per_prompt names {', '.join(unknown)}; the model takes {', '.join(served)}.")
        return {key: given.get(key, 1) for key in served}

    def _plugin(self, key: str) -> MultiModalPlugin:
        plugin = self._plugins.get(key)
        if plugin is None:
            raise NotImplementedError(f"Unknown modality {key!r}; known are {', '.join(self._plugins)}.")
        return plugin
