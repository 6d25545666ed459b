"""The arguments of transformers' `generate`, each with a setting to try and what `speculate` does with it.

`python -m tests.support.generate_arguments` prints the tables of docs/generate.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import CompileConfig, ContinuousBatchingConfig, WatermarkingConfig

HONOURED, REFUSED, UNUSED = "honoured", "refused", "no effect"
BEAMS = "for beam search, which is refused"
ASSISTED = "for transformers' own draft models; `proposer` drafts here"
TOKENIZER = "transformers does not pass the tokenizer on to callables"


@dataclass(frozen=True)
class Trial:
    """What happens to a field of `GenerationConfig`.

    settings: what to try, with other fields that it needs. They are made anew for each call.
    """

    outcome: str
    settings: Callable[[], dict[str, Any]]
    note: str = ""


def _try(outcome: str, note: str = "", **settings: Any) -> Trial:
    return Trial(outcome, lambda: settings, note)


def _sample(**settings: Any) -> Trial:
    return _try(HONOURED, do_sample=True, **settings)


def _returns(name: str, note: str = "") -> Trial:
    return _try(HONOURED, note, return_dict_in_generate=True, **{name: True})


TRIALS: dict[str, Trial] = {
    "max_length": _try(HONOURED, max_length=12, max_new_tokens=None),
    "max_new_tokens": _try(HONOURED, "rows also end at the context length", max_new_tokens=5),
    "min_length": _try(HONOURED, min_length=15, eos_token_id=[*range(3, 60)]),
    "min_new_tokens": _try(HONOURED, min_new_tokens=6, eos_token_id=[*range(3, 60)]),
    "early_stopping": _try(UNUSED, BEAMS, early_stopping=True),
    "max_time": _try(HONOURED, "checked after each token, and the model runs once a step", max_time=1e-9),
    "stop_strings": Trial(
        HONOURED,
        lambda: {"stop_strings": ["J@"]},
        "with `tokenizer`, as arguments of `generate`; in a generation config transformers refuses them for callables",
    ),
    "do_sample": _sample(),
    "num_beams": _try(REFUSED, num_beams=2),
    "use_mtp": _try(REFUSED, "the model's own draft layers", use_mtp=True),
    "use_cache": _try(
        HONOURED, "the model is run with a cache in any case", use_cache=False, return_dict_in_generate=True
    ),
    "cache_implementation": _try(
        HONOURED,
        "`dynamic` and `static`; others trade memory for speed or change the logits, and are refused",
        cache_implementation="static",
        return_dict_in_generate=True,
    ),
    "cache_config": _try(UNUSED, "for quantized caches, which are refused", cache_config={"nbits": 4}),
    "max_cache_len": _try(HONOURED, max_cache_len=90, cache_implementation="static", return_dict_in_generate=True),
    "temperature": _sample(temperature=0.5),
    "top_k": _sample(top_k=5),
    "top_p": _sample(top_p=0.5),
    "min_p": _sample(min_p=0.2),
    "top_h": _sample(top_h=0.4),
    "typical_p": _sample(typical_p=0.5),
    "epsilon_cutoff": _sample(epsilon_cutoff=0.02),
    "eta_cutoff": _sample(eta_cutoff=0.02),
    "repetition_penalty": _try(HONOURED, repetition_penalty=1.5),
    "encoder_repetition_penalty": _try(HONOURED, encoder_repetition_penalty=1.5),
    "length_penalty": _try(UNUSED, BEAMS, length_penalty=2.0),
    "no_repeat_ngram_size": _try(HONOURED, no_repeat_ngram_size=1),
    "encoder_no_repeat_ngram_size": _try(HONOURED, encoder_no_repeat_ngram_size=1, max_new_tokens=60),
    "bad_words_ids": _try(HONOURED, bad_words_ids=[[token] for token in range(40, 90)]),
    "renormalize_logits": _sample(renormalize_logits=True, top_k=5),
    "forced_bos_token_id": _try(HONOURED, "after a prompt of one token", forced_bos_token_id=44),
    "forced_eos_token_id": _try(HONOURED, forced_eos_token_id=55),
    "remove_invalid_values": _try(HONOURED, remove_invalid_values=True),
    "exponential_decay_length_penalty": _try(
        HONOURED, exponential_decay_length_penalty=(2, 3.0), eos_token_id=[*range(50, 56)]
    ),
    "suppress_tokens": _try(HONOURED, suppress_tokens=[*range(40, 90)]),
    "begin_suppress_tokens": _try(HONOURED, begin_suppress_tokens=[*range(3, 90)]),
    "sequence_bias": _try(HONOURED, sequence_bias=[[[token], -50.0] for token in range(40, 90)]),
    "token_healing": _try(REFUSED, TOKENIZER, token_healing=True),
    "guidance_scale": _try(REFUSED, "runs the model a second time for each token", guidance_scale=1.5),
    "watermarking_config": Trial(
        HONOURED,
        lambda: {"watermarking_config": WatermarkingConfig(bias=9.0)},
        "`SynthIDTextWatermarkingConfig` keeps a state between calls and is refused",
    ),
    "num_return_sequences": _sample(num_return_sequences=3),
    "output_attentions": _returns("output_attentions", "with eager attention, by one more pass; else refused"),
    "output_hidden_states": _returns("output_hidden_states", "by one more pass over the finished text"),
    "output_scores": _returns("output_scores", "of the kept tokens, recorded as they are made"),
    "output_logits": _returns("output_logits", "of the kept tokens, recorded as they are made"),
    "return_dict_in_generate": _try(HONOURED, "with a cache to go on from", return_dict_in_generate=True),
    "pad_token_id": _try(HONOURED, pad_token_id=1, eos_token_id=24),
    "bos_token_id": _try(HONOURED, "the prompt, if none is given", bos_token_id=7),
    "eos_token_id": _try(HONOURED, eos_token_id=[*range(3, 60)]),
    "decoder_start_token_id": _try(UNUSED, "for encoder-decoder models, which are refused", decoder_start_token_id=5),
    "is_assistant": _try(REFUSED, "set by transformers in draft models", is_assistant=True),
    "num_assistant_tokens": _try(UNUSED, ASSISTED, num_assistant_tokens=3),
    "num_assistant_tokens_schedule": _try(UNUSED, ASSISTED, num_assistant_tokens_schedule="heuristic"),
    "assistant_confidence_threshold": _try(UNUSED, ASSISTED, assistant_confidence_threshold=0.9),
    "prompt_lookup_num_tokens": _try(REFUSED, "pass `proposer=NGramProposer()`", prompt_lookup_num_tokens=3),
    "max_matching_ngram_size": _try(UNUSED, ASSISTED, max_matching_ngram_size=3),
    "assistant_early_exit": _try(REFUSED, "pass a `DraftProposer` of the first layers", assistant_early_exit=1),
    "assistant_lookbehind": _try(UNUSED, ASSISTED, assistant_lookbehind=3),
    "target_lookbehind": _try(UNUSED, ASSISTED, target_lookbehind=3),
    "assistant_ensemble_weight": _try(UNUSED, ASSISTED, assistant_ensemble_weight=0.5),
    "speculation_type": _try(UNUSED, ASSISTED, speculation_type="dflash"),
    "compile_config": Trial(
        UNUSED, lambda: {"compile_config": CompileConfig()}, "pass `accelerate` for compiled layers"
    ),
    "disable_compile": _try(UNUSED, "as for `compile_config`", disable_compile=True),
    "continuous_batching_config": Trial(
        UNUSED,
        lambda: {"continuous_batching_config": ContinuousBatchingConfig()},
        "for `generate_batch`",
    ),
    "low_memory": _try(UNUSED, "for contrastive search, which is refused", low_memory=True),
    "penalty_alpha": _try(REFUSED, "contrastive search", penalty_alpha=0.6, top_k=4),
    "dola_layers": _try(REFUSED, dola_layers="high"),
    "diversity_penalty": _try(UNUSED, BEAMS, diversity_penalty=0.5),
    "num_beam_groups": _try(REFUSED, num_beam_groups=2),
    "constraints": _try(REFUSED, constraints=[1]),
    "force_words_ids": _try(REFUSED, force_words_ids=[[5]]),
    "prefill_chunk_size": _try(UNUSED, "prompts are read in chunks of 512 tokens", prefill_chunk_size=3),
    "transformers_version": _try(UNUSED, "says who wrote the file", transformers_version="5.0.0"),
}

# The arguments of the call itself, and the model's inputs among them.
CALL_ARGUMENTS = {
    "inputs": (HONOURED, "and `input_ids`"),
    "generation_config": (HONOURED, "as in the table below"),
    "logits_processor": (
        HONOURED,
        "each sees one row, with its padding, and no token after its end; in a batch, a copy of yours each",
    ),
    "stopping_criteria": (HONOURED, "as `logits_processor`; they get no scores"),
    "prefix_allowed_tokens_fn": (HONOURED, ""),
    "synced_gpus": (REFUSED, ""),
    "assistant_model": (REFUSED, "pass `proposer=DraftProposer(Target(assistant_model))`"),
    "streamer": (HONOURED, "gets the tokens of each step at once"),
    "negative_prompt_ids": (REFUSED, "with `guidance_scale`, without which it has no effect"),
    "negative_prompt_attention_mask": (REFUSED, "as `negative_prompt_ids`"),
    "custom_generate": (HONOURED, "`speculate`"),
    "attention_mask": (HONOURED, "padding on both sides and holes, with transformers' positions"),
    "position_ids": (HONOURED, "two dimensions"),
    "token_type_ids": (HONOURED, "new tokens get the last one, as in transformers"),
    "inputs_embeds": (HONOURED, "the prompt; without `input_ids`, proposers see the new tokens alone"),
    "cache": (
        HONOURED,
        "a `DynamicCache` or a `StaticCache`, continued in place; heads read the cached tokens once more; named "
        "`past_key_values` before transformers 5.24",
    ),
    "other model inputs": (REFUSED, ""),
}


def make_tables() -> str:
    """Both tables in Markdown."""
    rows = ["| argument of the call | with `speculate` | |", "|---|---|---|"]
    rows += [f"| `{name}` | {outcome} | {note} |" for name, (outcome, note) in CALL_ARGUMENTS.items()]
    rows += ["", "| field of `GenerationConfig` | with `speculate` | |", "|---|---|---|"]
    rows += [f"| `{name}` | {trial.outcome} | {trial.note} |" for name, trial in TRIALS.items()]
    return "\n".join(rows).replace("| `other model inputs` |", "| other model inputs |") + "\n"


if __name__ == "__main__":
    print(make_tables())
