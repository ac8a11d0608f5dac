"""From settings to a scheduler: which combinations make sense, which policy decides, what it says about itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from atom_async.cache.pool import BlockPool
from atom_async.config import EngineConfig
from atom_async.events.schema import Event

from .core import Scheduler
from .cost_model import CostModel
from .limits import Limits
from .policy import DefaultPolicy, Policy
from .waits import Boundaries

Decider = tuple[Policy, CostModel]


def make_decider(config: EngineConfig) -> Decider:
    """The policy and the cost model it reads. Raises ValueError; needs no workers, so that a wrong --policy is known
    before a model is loaded."""
    costs = CostModel()
    return load_policy(config, costs), costs


def make_scheduler(
    config: EngineConfig,
    *,
    num_blocks: int,
    max_plan_bytes: int,
    max_model_len: int,
    decider: Decider | None = None,
    boundaries: Boundaries | None = None,
    emit: Callable[[Event], None] = lambda event: None,
) -> Scheduler:
    """Raises ValueError for settings that cannot work together. `decider`: made before, when that was early."""
    check_settings(config, max_model_len)
    policy, costs = decider or make_decider(config)
    return Scheduler(
        pool=BlockPool(num_blocks),
        limits=limits_of(config, max_plan_bytes),
        policy=policy,
        costs=costs,
        boundaries=boundaries,
        interval=config.prefill_decode_interval,
        emit=emit,
    )


def limits_of(config: EngineConfig, max_plan_bytes: int) -> Limits:
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_plan_bytes=max_plan_bytes,
        block_size=config.block_size,
        prefix_caching=config.enable_prefix_caching,
        max_chunk_tokens=config.max_chunk_tokens,
        chunked=config.enable_chunked_prefill,
        separate=config.step_policy == "separate",
        prefix_wait_s=None if config.prefix_wait_ms is None else config.prefix_wait_ms / 1e3,
        max_bypass_s=config.max_bypass_ms / 1e3,
    )


def load_policy(config: EngineConfig, costs: CostModel) -> Policy:
    """The policy that `config.policy` names. Raises ValueError saying what is wrong with the name or class."""
    if config.policy == "default":
        return DefaultPolicy(config, costs)
    module_name, _, class_name = config.policy.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"--policy {config.policy!r}: expected `default` or `package.module:Class`")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever its code raises while it is imported
        raise ValueError(f"--policy {config.policy!r}: {module_name} cannot be imported: {error!r}") from error
    factory = getattr(module, class_name, None)
    if factory is None:
        raise ValueError(f"--policy {config.policy!r}: {module_name} has no {class_name}")
    try:
        policy: Policy = factory(config, costs)
    except Exception as error:
        raise ValueError(f"--policy {config.policy!r}: cannot be made with (config, costs): {error!r}") from error
    missing = [name for name in ("order", "gate", "bound") if not callable(getattr(policy, name, None))]
    if missing:
        raise ValueError(f"--policy {config.policy!r}: {class_name} has no {', '.join(missing)}()")
    return policy


def check_settings(config: EngineConfig, max_model_len: int = 0) -> None:
    """Raises ValueError for a combination of settings that cannot do what it says."""
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ValueError(
            f"--max-num-batched-tokens ({config.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({config.max_num_seqs}): a step carries one token for each decoding sequence"
        )
    if config.kv_low_watermark >= config.kv_high_watermark:
        raise ValueError(
            f"--kv-low-watermark ({config.kv_low_watermark:g}) must be below --kv-high-watermark "
            f"({config.kv_high_watermark:g}): otherwise prefill is never held and coalescing does nothing"
        )
    if config.itl_target_ms not in ("auto", "off") and float(config.itl_target_ms) == 0:
        raise ValueError("--itl-target-ms 0 leaves no time for any step: give a time, `auto` or `off`")
    coalescing = config.coalesce_target_fill > 0
    if coalescing or config.prefill_decode_interval:
        holding = "--coalesce-target-fill" if coalescing else "--prefill-decode-interval"
        ends_at_once = {
            "--coalesce-max-hold-ms": config.coalesce_max_hold_ms == 0,
            "--prefill-max-queue-ms": config.prefill_max_queue_ms == 0,
            "--kv-high-watermark": config.kv_high_watermark == 0,
            "--coalesce-quiet-ms": coalescing and not config.prefill_decode_interval and config.coalesce_quiet_ms == 0,
        }
        for flag, never_holds in ends_at_once.items():
            if never_holds:
                raise ValueError(f"{holding} with {flag} 0 never holds: leave one of them out")
    if not config.enable_chunked_prefill and (
        config.itl_target_ms not in ("auto", "off") or config.max_decode_gap_ms is not None
    ):
        raise ValueError(
            "--itl-target-ms and --max-decode-gap-ms bound chunks, and --no-enable-chunked-prefill allows none"
        )
    if config.step_policy == "separate" and config.itl_target_ms not in ("auto", "off"):
        raise ValueError(
            f"--itl-target-ms {config.itl_target_ms} bounds a step that carries decodes and prefill: with "
            "--step-policy separate there is none; use --max-decode-gap-ms"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len + config.max_num_seqs:
        raise ValueError(
            f"--no-enable-chunked-prefill needs a step to take any prompt beside all decodes: raise "
            f"--max-num-batched-tokens to {max_model_len + config.max_num_seqs} or lower --max-model-len"
        )
    if not config.enable_chunked_prefill and config.max_chunk_tokens:
        raise ValueError("--max-chunk-tokens caps chunks, and --no-enable-chunked-prefill allows none")


def describe(config: EngineConfig) -> str:
    """The effective policy in one line, for the start's log."""
    if config.policy != "default":
        return f"{config.policy} (its own order, holds and step bounds)"
    steps = f"{config.step_policy} steps"
    if config.step_policy == "mixed" and config.itl_target_ms != "off":
        target = config.itl_target_ms
        steps += " bounded by predicted time" if target == "auto" else f" of at most {target} ms beside decodes"
    parts = [steps, "least work first" if config.queue_policy == "least-work" else "first come first served"]
    if config.coalesce_target_fill > 0:
        parts.append(
            f"prefill held until {config.coalesce_target_fill:.0%} of the budget, {config.coalesce_quiet_ms:g} ms "
            f"of quiet or {config.coalesce_max_hold_ms:g} ms"
        )
    if config.prefill_decode_interval:
        parts.append(f"{config.prefill_decode_interval} decode-only steps after each prefill")
    if config.max_decode_gap_ms is not None:
        parts.append(f"decode gap at most {config.max_decode_gap_ms:g} ms")
    if len(parts) == 2:
        parts.append("prefill starts at once")
    parts.append("in-flight prefixes shared" if config.enable_prefix_caching else "no prefix caching")
    return ", ".join(parts)
