"""How byte-level tokenizers split a text before merges: regular expressions by the names in GGUF files.

Each expression splits the pieces of the one before. Its matches and the text between them become pieces.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # of English words
SPACES = r"\s+(?!\S)|\s+"
LINES = rf"\s*[\r\n]+|{SPACES}"
WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
MARKED_WORDS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEGIN = r"[^\r\n\p{L}\p{N}]?"
PATHS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"
CHINESE = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"  # and other scripts between
KANA = r"[\x{3040}-\x{30FF}\x{4E00}-\x{9FA5}]+"  # and Chinese characters
MARKS = r"\s?[!-/:-~\x{2018}-\x{201F}\x{3000}-\x{3002}\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}]+"
# Letters with a case, of an older Unicode and without mathematical ones.
CASED = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}"
    r"\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{16EBF}\x{1D400}-\x{1DFFF}]]+"
)
SENTENCES = r" ?[^(\s|.,!?\x{2026}\x{3001}\x{3002}\x{FF0C}\x{964}\x{6D4}\x{60C})]+"
BLOCKS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}"
)

LLAMA3 = (rf"{WORDS}|\p{{N}}{{1,3}}|{SIGNS}|{LINES}",)
QWEN2 = (rf"{WORDS}|\p{{N}}|{SIGNS}|{LINES}",)
KINDS: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum modern-bert trillion granite-docling exaone4": (GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", GPT2),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5": LLAMA3,
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": QWEN2,
    "qwen35": (rf"{MARKED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}",),
    "tekken": (rf"{BEGIN}{UPPER}*{LOWER}+|{BEGIN}{UPPER}+{LOWER}*|\p{{N}}|{PATHS}",),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (
        rf"{BEGIN}{UPPER}*{LOWER}+{ENDINGS}?|{BEGIN}{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}|{PATHS}",
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", KANA, BLOCKS),
    "deepseek-llm": (r"[\r\n]", rf"\s?{CASED}", MARKS, r"\s+$", CHINESE, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9]{3}"),
    "bloom poro-chat gpt3-finnish": (SENTENCES,),
    "viking": (SENTENCES, r"\p{N}"),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "bailingmoe bailingmoe2 llada-moe": (rf"{WORDS}|\p{{N}}|{SIGNS}|\s*[\r\n]|{SPACES}",),
    "seed-coder": (rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}",),
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}"),
}
SPLITS = {name: splits for names, splits in KINDS.items() for name in names.split()}
WITH_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
WHOLE_WORDS = WITH_BOS | {"glm4", "glm5"}  # a piece that is a token is not merged from its letters


def make_splitter(name: str) -> PreTokenizer:
    """The splitter that `tokenizer.ggml.pre` names. Raises ValueError for an unknown one."""
    if name not in SPLITS:
        raise ValueError(
            f"its tokenizer splits text in a way that is not supported, {name!r}; put the model's config.json, "
            "tokenizer.json and tokenizer_config.json next to the file"
        )
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
