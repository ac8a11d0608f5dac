"""Flags and environment variables, generated from the settings in `atom_async.config`.

`max_num_seqs` is `--max-num-seqs` and `ATOM_MAX_NUM_SEQS`; a flag wins over the environment, and both go through
the same check.
"""

from __future__ import annotations

import argparse
import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from atom_async.config import EngineConfig, ServeConfig

PREFIX = "ATOM_"
OTHER_VARIABLES = frozenset({"ATOM_CACHE_DIR"})
"""Read elsewhere; no settings."""

ALIASES = {
    "tp": ("-tp", "--tensor-parallel-size"),
    "kv_cache_memory": ("--kv-cache-memory-bytes",),
    "threads": ("--cpu-threads",),
}
"""Further spellings of a flag, as users of other servers type them."""

ATOM_VARIABLES = {
    "ATOM_PREFILL_DELAYER_TARGET_FILL": "coalesce_target_fill",
    "ATOM_PREFILL_DELAYER_MAX_DELAY_MS": "coalesce_max_hold_ms",
    "ATOM_PREFILL_DELAYER_MAX_QUEUE_MS": "prefill_max_queue_ms",
    "ATOM_PREFILL_DELAYER_KV_HIGH_WATERMARK": "kv_high_watermark",
    "ATOM_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK": "kv_low_watermark",
}
"""ATOM's own names of settings that mean the same here."""

ENABLE_DELAYER = "ATOM_ENABLE_PREFILL_DELAYER"
DELAYER_FILL = 0.5
"""--coalesce-target-fill where ATOM's variable turns holding on and nothing says how far."""

TICK_COUNTED = {
    "ATOM_PREFILL_DELAYER_TTFT_MAX_TICKS": "coalesce_max_hold_ms",
    "ATOM_PREFILL_DELAYER_PARTIAL_MAX_TICKS": "partial_max_hold_ms",
    "ATOM_PREFILL_DELAYER_STALL_TICKS": "coalesce_quiet_ms",
    "ATOM_PREFILL_DELAYER_MAX_DELAY_PASSES": "coalesce_max_hold_ms",
}
"""ATOM's variables that count scheduler passes, and the coalescer's setting in milliseconds for the same bound."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class ConfigError(ValueError):
    """A setting that cannot be; the message names the flag or variable."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a config struct."""

    name: str
    hint: Any
    """Its annotation, for `msgspec.convert`."""
    default: Any
    description: str
    choices: tuple[str, ...]
    is_bool: bool
    is_tuple: bool
    is_size: bool
    """In bytes, so that suffixes are taken."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


def settings_of(config: type[msgspec.Struct]) -> Iterator[Setting]:
    hints = typing.get_type_hints(config, include_extras=True)
    info = msgspec.inspect.type_info(config)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        kind, description = field.type, ""
        if isinstance(kind, msgspec.inspect.Metadata):
            description = (kind.extra_json_schema or {}).get("description", "")
            kind = kind.type
        choices = kind.values if isinstance(kind, msgspec.inspect.LiteralType) else ()
        yield Setting(
            name=field.name,
            hint=hints[field.name],
            default=field.default,
            description=description,
            choices=tuple(map(str, choices)),
            is_bool=isinstance(kind, msgspec.inspect.BoolType),
            is_tuple=isinstance(kind, msgspec.inspect.VarTupleType),
            is_size=description.startswith("bytes"),
        )


def add_config_flags(parser: argparse.ArgumentParser, *configs: type[msgspec.Struct]) -> None:
    """Adds the flags of these structs (default: EngineConfig and ServeConfig) and the positional MODEL.

    Values stay text: `load_config` checks them.
    """
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="same as --model")
    for config in configs or (EngineConfig, ServeConfig):
        group = parser.add_argument_group((config.__doc__ or config.__name__).split(":")[0].lower())
        for setting in settings_of(config):
            _add_flag(group, setting)


def _add_flag(group: argparse._ArgumentGroup, setting: Setting) -> None:
    flags = [setting.flag, *(alias for alias in ALIASES.get(setting.name, ()) if alias != setting.flag)]
    text = f"{setting.description} [{_shown_default(setting)}; {setting.variable}]".replace("%", "%%")
    if setting.is_bool:
        group.add_argument(*flags, dest=setting.name, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif setting.is_tuple:
        group.add_argument(*flags, dest=setting.name, action="append", metavar="X", help=text)
    else:
        metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else setting.name.upper()
        group.add_argument(*flags, dest=setting.name, metavar=metavar, help=text)


def _shown_default(setting: Setting) -> str:
    if setting.is_bool:
        return "on" if setting.default else "off"
    return "unset" if setting.default in (None, ()) else f"{setting.default}"


def load_config(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[EngineConfig, ServeConfig]:
    """The settings: flag, else environment variable, else default. Raises ConfigError."""
    _refuse_ticks(environ)
    variables = _variables(environ)
    given = dict(vars(args))
    model = given.pop("model_argument", None)
    if model is not None and given.get("model") not in (None, model):
        raise ConfigError(f"MODEL is {model} and --model is {given['model']}; give one of them")
    given["model"] = model if model is not None else given.get("model")
    return _load(EngineConfig, given, variables), _load(ServeConfig, given, variables)


C = typing.TypeVar("C", bound=msgspec.Struct)


def _load(config: type[C], given: Mapping[str, Any], variables: Mapping[str, _Variable]) -> C:
    values = {}
    for setting in settings_of(config):
        if given.get(setting.name) is not None:
            values[setting.name] = _checked(setting, given[setting.name], setting.flag)
        elif (variable := variables.get(setting.variable)) is not None:
            text = variable.text
            items = [item for item in text.split(",") if item] if setting.is_tuple else text
            values[setting.name] = _checked(setting, items, variable.name)
    return config(**values)


def _checked(setting: Setting, value: Any, source: str) -> Any:
    try:
        if setting.is_bool and isinstance(value, str):
            value = _boolean(value)
        elif setting.is_size:
            value = _size(value)
        elif isinstance(value, str) and re.fullmatch(r"\.\d+", value):
            value = "0" + value
        return msgspec.convert(value, setting.hint, strict=False)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        shown = "" if setting.name == "api_key" else f" {value!r}"
        if "matching regex" in str(error):
            raise ConfigError(f"{source}{shown}: {setting.description}") from error
        choices = f"; one of {', '.join(setting.choices)}" if setting.choices else ""
        raise ConfigError(f"{source}{shown}: {error}{choices}") from error


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(f"expected one of {', '.join(_BOOLEANS)}")
    return _BOOLEANS[text.lower()]


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] not in _UNITS:
        raise ValueError("expected a number of bytes such as 500000000, 500M, 2G or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class _Variable:
    """What the environment says of one setting."""

    name: str
    """The variable that was set: ours, or ATOM's."""
    text: str


def _variables(environ: Mapping[str, str]) -> dict[str, _Variable]:
    """By the name of our variable. Raises ConfigError where ATOM's variables contradict ours."""
    found = {name: _Variable(name, text) for name, text in environ.items()}
    for theirs, setting in ATOM_VARIABLES.items():
        if theirs in environ:
            _place(found, PREFIX + setting.upper(), _Variable(theirs, environ[theirs]))
    if ENABLE_DELAYER not in environ:
        return found
    fill = PREFIX + "COALESCE_TARGET_FILL"
    text = environ[ENABLE_DELAYER]
    try:
        enabled = _boolean(text)
    except ValueError as error:
        raise ConfigError(f"{ENABLE_DELAYER} {text!r}: {error}") from error
    if enabled:
        found.setdefault(fill, _Variable(ENABLE_DELAYER, str(DELAYER_FILL)))
    else:
        if fill in environ and environ[fill].strip("0.") != "":
            raise ConfigError(f"{ENABLE_DELAYER} is {text} and {fill} is {environ[fill]}: unset one of them")
        found[fill] = _Variable(ENABLE_DELAYER, "0")
    return found


def _place(found: dict[str, _Variable], ours: str, theirs: _Variable) -> None:
    if ours in found and found[ours].text != theirs.text:
        raise ConfigError(f"{theirs.name} is {theirs.text} and {ours} is {found[ours].text}: unset one of them")
    found[ours] = theirs


def _refuse_ticks(environ: Mapping[str, str]) -> None:
    for name, setting in TICK_COUNTED.items():
        if name in environ:
            raise ConfigError(
                f"{name} counts scheduler ticks, and here nothing ticks: unset it. The same bound in milliseconds "
                f"is --{setting.replace('_', '-')} ({PREFIX}{setting.upper()})"
            )


def environment_warnings(environ: Mapping[str, str]) -> list[str]:
    """One line for each ATOM_* variable that means nothing here, to be logged at start."""
    known = {setting.variable for config in (EngineConfig, ServeConfig) for setting in settings_of(config)}
    known |= OTHER_VARIABLES | ATOM_VARIABLES.keys() | {ENABLE_DELAYER}
    warnings = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and name not in TICK_COUNTED:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"the environment variable {name} has no effect in this version{hint}")
    return warnings
