"""The tokenizer of a GGUF file, from its header alone. It gives the same tokens as llama.cpp.

What llama.cpp takes by default where a header lacks a key is taken here.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from decode.weights.gguf.file import GgufFile
from decode.weights.gguf.splits import WHOLE_WORDS, WITH_BOS, make_splitter

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens
ROLES = {"unk_token": "unknown", "bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
SENTENCE_PIECE_ROLES = {"unknown": 0, "bos": 1, "eos": 2}  # of a "llama" vocabulary, if its header names no others
ENDS = "eos", "eot", "eom"  # of a text, a turn and a message
# Texts of tokens that end an answer, in the models that have them.
END_TEXTS = {
    *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOS]", "[e~["),
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>"),
}
SPACE = "\u2581"


class Vocabulary:
    """The tokens of a header.

    kind: of the tokenizer. texts, types, scores: of the tokens. roles: ids by name, such as "eos". ends: ids of the
    tokens that end an answer; the first is the one of `roles`, if it has one.
    """

    def __init__(self, file: GgufFile) -> None:
        """Raises ValueError if the header has no vocabulary, or a damaged one."""
        self.fields, name = file.fields, file.path.name
        self.kind = self.field("model", "none")
        texts = self.field("tokens", [])
        if not texts:
            raise ValueError(f"{name} has no tokenizer; put the model's config.json and tokenizer.json next to it")
        self.texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
        self.ids = {text: token for token, text in enumerate(self.texts)}
        if len(self.ids) < len(texts):
            twice = next(text for token, text in enumerate(self.texts) if self.ids[text] != token)
            raise ValueError(f"the vocabulary of {name} is damaged: it has {twice!r} twice")
        self.types = self.field("token_type", [0] * len(texts))
        self.scores = self.field("scores", [0.0] * len(texts))
        if min(len(self.types), len(self.scores)) < len(texts):
            raise ValueError(f"the vocabulary of {name} is damaged: not all of its tokens have a type and a score")
        self.template: str | None = file.fields.get("tokenizer.chat_template")
        self.roles = self._find_roles()
        self.ends = self._find_ends()

    def field(self, key: str, default: Any) -> Any:
        return self.fields.get(f"tokenizer.ggml.{key}", default)

    def _find_roles(self) -> dict[str, int]:
        """The roles that the header names, and those of the first tokens if they are SentencePiece's special ones."""
        roles = {}
        for role in (*ROLES.values(), *ENDS):
            token = self.field(f"{role}_token_id", -1)
            if 0 <= token < len(self.texts):
                roles[role] = token
        if self.kind == "llama":
            special = {token for token, kind in enumerate(self.types[:3]) if kind in (UNKNOWN, CONTROL)}
            roles = {role: token for role, token in SENTENCE_PIECE_ROLES.items() if token in special} | roles
        return roles

    def _find_ends(self) -> list[int]:
        """Ends that the header names, control tokens that are ends by their text, and others in the chat template."""
        named = [self.roles[role] for role in ENDS if role in self.roles]
        known = sorted(self.ids[text] for text in END_TEXTS & self.ids.keys())
        found = [token for token in known if self.types[token] == CONTROL or self.texts[token] in (self.template or "")]
        texts = {self.texts[token] for token in (*named, *found)}
        if texts >= {"<|return|>", "<|call|>"} or texts >= {"<|flush|>", "<|calls|>"}:
            found = [token for token in found if self.texts[token] != "<|end|>"]  # ends a message, not the answer
        return [*dict.fromkeys([*named, *found])]


def make_tokenizer(file: GgufFile, vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """The tokenizer of a file, with its special tokens and chat template. Raises ValueError for an unknown kind.

    Also for a token that is not UTF-8: tokenizers cannot hold it.
    """
    kind = vocabulary.kind
    if kind not in MAKERS:
        raise ValueError(
            f"{file.path.name} has a tokenizer of the kind {kind!r}; supported are {', '.join(MAKERS)}. For others, "
            "put the model's config.json, tokenizer.json and tokenizer_config.json next to the file"
        )
    if any("\udc80" <= letter <= "\udcff" for letter in "".join(vocabulary.texts)):  # as `GgufFile` reads such bytes
        raise ValueError(
            f"{file.path.name} has a token that is not UTF-8; put the model's config.json and tokenizer.json next to it"
        )
    backend = MAKERS[kind](vocabulary)
    name = str(file.fields.get("general.name", "")).lower()
    backend.add_tokens(_list_added(vocabulary, "phi-3" in name or "phi3" in name))
    _add_frame(backend, vocabulary)
    special = {role: vocabulary.texts[vocabulary.roles[key]] for role, key in ROLES.items() if key in vocabulary.roles}
    length = file.fields.get(f"{file.architecture}.context_length")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=length, **special)
    tokenizer.chat_template = vocabulary.template
    return tokenizer


def _make_byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE."""
    kind = vocabulary.field("pre", "default")
    backend = Tokenizer(models.BPE(vocabulary.ids, _read_merges(vocabulary), ignore_merges=kind in WHOLE_WORDS))
    backend.pre_tokenizer = make_splitter(kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def _make_sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    """SentencePiece's BPE: of neighbours that are a token together, those with the highest score are merged first."""
    has_prefix = vocabulary.field("add_space_prefix", True)
    backend = _make_with_bytes(vocabulary, _find_merges(vocabulary))
    if has_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), backend.normalizer])
        backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    return backend


def _make_gemma4(vocabulary: Vocabulary) -> Tokenizer:
    """BPE of characters with the merges of the file. Lines are merged apart from line breaks."""
    backend = _make_with_bytes(vocabulary, _read_merges(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return backend


MAKERS = {"gpt2": _make_byte_level, "llama": _make_sentence_piece, "gemma4": _make_gemma4}


def _make_with_bytes(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> Tokenizer:
    """BPE of characters, where a space is U+2581, and characters that are no tokens are bytes."""
    unknown = vocabulary.texts[vocabulary.roles["unknown"]] if "unknown" in vocabulary.roles else None
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _read_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges of the file whose parts and result are tokens."""
    ids, merges = vocabulary.ids, vocabulary.field("merges", None)
    if merges is None:
        raise ValueError("its tokenizer has no merges; fetch the file again, or convert the model anew")
    cuts = [(merge, merge.find(" ", 1)) for merge in merges]
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]
    return [pair for pair in pairs if all(part in ids for part in (*pair, "".join(pair)))]


def _find_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, the one with the highest score first."""
    ids, texts, scores = vocabulary.ids, vocabulary.texts, vocabulary.scores
    merges = []
    for token in sorted(range(len(texts)), key=lambda token: -scores[token]):
        text = texts[token]
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
    return merges


def _list_added(vocabulary: Vocabulary, strips: bool) -> list[AddedToken]:
    """The tokens that are found in a text before it is split. strips: most of them take the spaces after them."""
    special = {*vocabulary.roles.values(), *vocabulary.ends}
    added = []
    for token, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=False)):
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED) and token not in special:
            continue
        rstrip = strips and text not in ("<unk>", "<s>", "<|endoftext|>")
        is_special = kind != USER_DEFINED or token in special
        added.append(AddedToken(text, rstrip=rstrip, normalized=False, special=is_special))
    return added


def _add_frame(backend: Tokenizer, vocabulary: Vocabulary) -> None:
    """Let a text begin with BOS and end with EOS, if the header or the kind of tokenizer asks for it."""
    kind, roles, texts = vocabulary.kind, vocabulary.roles, vocabulary.texts
    has_bos = kind != "gpt2" or vocabulary.field("pre", "default") in WITH_BOS
    adds_bos = kind == "gemma4" or vocabulary.field("add_bos_token", has_bos)  # files of Gemma 4 may deny it wrongly
    begin = [texts[roles["bos"]]] if adds_bos and "bos" in roles else []
    end = [texts[roles["eos"]]] if vocabulary.field("add_eos_token", False) and "eos" in roles else []
    if begin or end:
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *begin, "$B", *end],
            special_tokens=[(text, vocabulary.ids[text]) for text in {*begin, *end}],
        )
