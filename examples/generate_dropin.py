"""Speculative decoding inside transformers' `model.generate`: two more arguments, the same tokens.

python examples/generate_dropin.py [MODEL]
"""

import sys

import torch

from draftless import Target, speculate


def main(name: str | None = None) -> None:
    stock = Target.load(name, accelerate="off")  # or load a model with transformers
    model, tokenizer = stock.model, stock.tokenizer
    chat = [{"role": "user", "content": "Repeat this list, then add two colours: red, orange, yellow, green, blue."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")

    plain = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    # On a CPU, accelerate="auto" makes a fast copy of the model, and keeps it for the next call.
    added = {"custom_generate": speculate, "accelerate": "auto"}
    fast = model.generate(**inputs, max_new_tokens=64, do_sample=False, **added)
    print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print("the same tokens as plain decoding:", torch.equal(plain, fast))


if __name__ == "__main__":
    main(*sys.argv[1:])
