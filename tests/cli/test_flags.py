"""Settings from flags and environment: names, precedence, checks, messages."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from atom_async.cli.flags import (
    TICK_COUNTED,
    ConfigError,
    add_config_flags,
    environment_warnings,
    load_config,
    settings_of,
)
from atom_async.config import EngineConfig, ServeConfig

SETTINGS = [*settings_of(EngineConfig), *settings_of(ServeConfig)]

VALUES: dict[str, tuple[str, Any]] = {
    "model": ("some/model", "some/model"),
    "revision": ("v1", "v1"),
    "tokenizer": ("dir", "dir"),
    "load_format": ("dummy", "dummy"),
    "device": ("simulated", "simulated"),
    "dtype": ("bfloat16", "bfloat16"),
    "tp": ("4", 4),
    "max_model_len": ("1000", 1000),
    "max_num_seqs": ("7", 7),
    "max_num_batched_tokens": ("99", 99),
    "block_size": ("32", 32),
    "kv_cache_memory": ("1.5GiB", 3 * 2**29),
    "gpu_memory_utilization": ("0.5", 0.5),
    "max_steps_in_flight": ("1", 1),
    "step_timeout": ("2.5", 2.5),
    "startup_timeout": ("9", 9.0),
    "threads": ("3", 3),
    "seed": ("11", 11),
    "simulation": ("{}", "{}"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "served_model_name": ("a", ("a",)),
    "api_key": ("k", ("k",)),
    "chat_template": ("t.jinja", "t.jinja"),
    "tool_call_parser": ("hermes", "hermes"),
    "max_logprobs": ("5", 5),
    "max_chunk_tokens": ("512", 512),
    "step_policy": ("separate", "separate"),
    "itl_target_ms": ("25.5", "25.5"),
    "queue_policy": ("fcfs", "fcfs"),
    "overtake_factor": ("1.5", 1.5),
    "max_bypass_ms": ("250", 250.0),
    "prefix_wait_ms": ("2000", 2000.0),
    "coalesce_target_fill": ("0.5", 0.5),
    "coalesce_quiet_ms": ("5", 5.0),
    "coalesce_max_hold_ms": ("100", 100.0),
    "prefill_max_queue_ms": ("500", 500.0),
    "partial_max_hold_ms": ("50", 50.0),
    "kv_high_watermark": ("0.8", 0.8),
    "kv_low_watermark": ("0.1", 0.1),
    "prefill_decode_interval": ("4", 4),
    "max_decode_gap_ms": ("200", 200.0),
    "policy": ("mine:Policy", "mine:Policy"),
    "max_queued_requests": ("1000", 1000),
    "max_queued_tokens": ("1000000", 1000000),
    "drain_timeout": ("0", 0.0),
    "failure_linger": ("1", 1.0),
    "log_level": ("debug", "debug"),
    "root_path": ("/x", "/x"),
}


def load(*arguments: str, **environ: str) -> tuple[EngineConfig, ServeConfig]:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_config_flags(parser)
    return load_config(parser.parse_args(arguments), environ)


def value_of(configs: tuple[EngineConfig, ServeConfig], name: str) -> Any:
    return getattr(configs[0] if hasattr(configs[0], name) else configs[1], name)


def test_defaults_are_those_of_the_structs() -> None:
    assert load() == (EngineConfig(), ServeConfig())


@pytest.mark.parametrize("setting", [s for s in SETTINGS if not s.is_bool], ids=lambda s: s.name)
def test_every_setting_has_a_flag_and_a_variable(setting: Any) -> None:
    text, value = VALUES[setting.name]
    assert value_of(load(setting.flag, text), setting.name) == value
    assert value_of(load(**{setting.variable: text}), setting.name) == value


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.is_bool], ids=lambda s: s.name)
def test_switches(setting: Any) -> None:
    assert value_of(load(setting.flag), setting.name) is True
    assert value_of(load("--no-" + setting.flag[2:]), setting.name) is False
    for text, value in {"1": True, "true": True, "On": True, "0": False, "no": False}.items():
        assert value_of(load(**{setting.variable: text}), setting.name) is value
    with pytest.raises(ConfigError, match=setting.variable):
        load(**{setting.variable: "maybe"})


def test_a_fraction_needs_no_leading_zero() -> None:
    assert load("--coalesce-target-fill", ".5")[0].coalesce_target_fill == 0.5


def test_a_flag_wins_over_the_environment() -> None:
    assert load("--port", "1", ATOM_PORT="2")[1].port == 1
    assert load("--no-enable-prefix-caching", ATOM_ENABLE_PREFIX_CACHING="1")[0].enable_prefix_caching is False


def test_the_positional_model() -> None:
    assert load("a/b")[0].model == "a/b"
    assert load("a/b", "--model", "a/b", ATOM_MODEL="c/d")[0].model == "a/b"
    with pytest.raises(ConfigError, match="one of them"):
        load("a/b", "--model", "c/d")


def test_spellings_of_other_servers() -> None:
    assert load("-tp", "2")[0].tp == load("--tensor-parallel-size", "2")[0].tp == 2


def test_repeated_settings() -> None:
    assert load("--api-key", "a", "--api-key", "b")[1].api_key == ("a", "b")
    assert load(ATOM_SERVED_MODEL_NAME="a,b")[1].served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("text", "number"),
    [("500000000", 500_000_000), ("500M", 500_000_000), ("2g", 2 * 10**9), ("1KiB", 1024), ("3 MB", 3 * 10**6)],
)
def test_sizes(text: str, number: int) -> None:
    assert load("--kv-cache-memory", text)[0].kv_cache_memory == number


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--port", "99999"], {}, "--port '99999'.*<= 65535"),
        ([], {"ATOM_PORT": "99999"}, "ATOM_PORT '99999'.*<= 65535"),
        (["--tp", "0"], {}, "--tp '0'.*>= 1"),
        (["--tp", "two"], {}, "--tp 'two'.*int"),
        (["--dtype", "int8"], {}, "--dtype 'int8'.*bfloat16"),
        (["--gpu-memory-utilization", "1.5"], {}, "<= 1"),
        (["--kv-cache-memory", "much"], {}, "--kv-cache-memory 'much'.*1.5GiB"),
        (["--kv-cache-memory", "0"], {}, ">= 1"),
        (["--itl-target-ms", "-5"], {}, "--itl-target-ms '-5': predicted time .* milliseconds, `auto`"),
    ],
)
def test_what_cannot_be_names_its_source(arguments: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(*arguments, **environ)


NUMBERS = [s for s in SETTINGS if isinstance(VALUES.get(s.name, ("", ""))[1], int | float) and not s.is_bool]


@pytest.mark.parametrize("text", ["9" * 30, "9" * 400, "1e400", "inf", "nan", "-1", "1_0", "\u0663", "5\n", "5 5", ""])
@pytest.mark.parametrize(
    "setting", [*NUMBERS, *(s for s in SETTINGS if s.name == "itl_target_ms")], ids=lambda s: s.name
)
def test_no_number_is_beyond_what_is_counted_with(setting: Any, text: str) -> None:
    try:
        answer = value_of(load(f"{setting.flag}={text}"), setting.name)
    except ConfigError as error:
        answer = str(error)
    assert setting.flag in answer if isinstance(answer, str) else 0 <= answer < 2**63


@pytest.mark.parametrize("name", sorted(TICK_COUNTED))
def test_tick_counted_variables_stop_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*--{TICK_COUNTED[name].replace('_', '-')}"):
        load(**{name: "5"})


def test_atoms_own_variables_set_the_same_here() -> None:
    environ = {
        "ATOM_ENABLE_PREFILL_DELAYER": "1",
        "ATOM_PREFILL_DECODE_INTERVAL": "4",
        "ATOM_PREFILL_DELAYER_MAX_DELAY_MS": "150",
        "ATOM_PREFILL_DELAYER_MAX_QUEUE_MS": "700",
        "ATOM_PREFILL_DELAYER_KV_HIGH_WATERMARK": "0.8",
        "ATOM_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK": "0.1",
    }
    config, _ = load(**environ)
    assert (config.coalesce_target_fill, config.prefill_decode_interval, config.prefill_max_queue_ms) == (0.5, 4, 700)
    assert (config.kv_high_watermark, config.kv_low_watermark) == (0.8, 0.1)
    assert config.coalesce_max_hold_ms == 150
    assert environment_warnings(environ) == []
    config, _ = load(**environ, ATOM_PREFILL_DELAYER_TARGET_FILL="0.25")
    assert config.coalesce_target_fill == 0.25
    config, _ = load(ATOM_ENABLE_PREFILL_DELAYER="0", ATOM_PREFILL_DELAYER_TARGET_FILL="0.25")
    assert config.coalesce_target_fill == 0
    config, _ = load("--coalesce-target-fill", "0.75", ATOM_ENABLE_PREFILL_DELAYER="1")
    assert config.coalesce_target_fill == 0.75


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"ATOM_ENABLE_PREFILL_DELAYER": "perhaps"}, "ATOM_ENABLE_PREFILL_DELAYER"),
        ({"ATOM_PREFILL_DELAYER_MAX_QUEUE_MS": "5", "ATOM_PREFILL_MAX_QUEUE_MS": "6"}, "unset one of them"),
        ({"ATOM_PREFILL_DELAYER_TARGET_FILL": "7"}, "ATOM_PREFILL_DELAYER_TARGET_FILL '7'.*<= 1"),
        ({"ATOM_ENABLE_PREFILL_DELAYER": "0", "ATOM_COALESCE_TARGET_FILL": "0.5"}, "unset one of them"),
    ],
)
def test_atoms_own_variables_are_checked(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(**environ)


def test_unknown_variables_are_pointed_out() -> None:
    warnings = environment_warnings({"ATOM_MAX_NUM_SEQ": "1", "ATOM_PORT": "1", "ATOM_CACHE_DIR": "x", "HOME": "/"})
    assert warnings == [
        "the environment variable ATOM_MAX_NUM_SEQ has no effect in this version; did you mean ATOM_MAX_NUM_SEQS?"
    ]


def test_keys_are_not_in_messages() -> None:
    config = ServeConfig(api_key=("secret",))
    assert "secret" not in str(environment_warnings({"ATOM_API_KEYS": "secret"}))
    assert config.api_key == ("secret",)
