"""What an example script downloads, made here: pairs of sentences, their tokenizer, a model, a metric.

The classes are those of transformers where it is installed, and otherwise small ones that are called in the same way.
"""

from __future__ import annotations

import os
import random
from collections import Counter, UserDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

WORDS = [f"w{number}" for number in range(24)]
Example = dict[str, Any]


def load_dataset(count: int, seed: int) -> list[Example]:
    """Pairs of sentences of several lengths: the label says from which words they are more often."""
    draw = random.Random(seed)

    def sentence(label: int) -> str:
        return " ".join(draw.choice(WORDS[8 * label : 8 * label + 16]) for _ in range(draw.randint(3, 9)))

    labels = [draw.randint(0, 1) for _ in range(count)]
    return [{"sentence1": sentence(label), "sentence2": sentence(label), "labels": label} for label in labels]


class Encoding(UserDict[str, torch.Tensor]):
    """A batch that is no dict, and whose `to` moves it in place, as that of transformers does."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: each.to(device) for key, each in self.data.items()}
        return self


class Tokenizer:
    vocabulary: ClassVar = {word: number for number, word in enumerate(["[PAD]", "[SEP]", *WORDS])}

    def __call__(self, first: str, second: str, truncation: bool = True, max_length: int | None = None) -> Example:
        ids = [self.vocabulary[word] for word in (*first.split(), "[SEP]", *second.split())]
        return {"input_ids": ids[:max_length], "attention_mask": [1] * len(ids[:max_length])}

    def pad(self, examples: Sequence[Example], pad_to_multiple_of: int | None = None, **_: Any) -> Encoding:
        longest = max(len(each["input_ids"]) for each in examples)
        longest += -longest % (pad_to_multiple_of or 1)
        padded = {
            key: torch.tensor([each[key] + [0] * (longest - len(each[key])) for each in examples])
            for key in ("input_ids", "attention_mask")
        }
        return Encoding({**padded, "labels": torch.tensor([each["labels"] for each in examples])})


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(Tokenizer.vocabulary), 16)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Output:
        mask = attention_mask.unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(torch.tanh(self.hidden(mean)))
        return Output(F.cross_entropy(logits.float(), labels), logits)


def linear_schedule(optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int) -> LambdaLR:
    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


class Metric:
    """As `evaluate.load("glue", "mrpc")` returns it; it has the number of rows, too."""

    def __init__(self) -> None:
        self._pairs: Counter[tuple[int, int]] = Counter()

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self._pairs.update(zip(predictions.tolist(), references.tolist(), strict=True))

    def compute(self) -> dict[str, float]:
        pairs, self._pairs = self._pairs, Counter()
        right, count = pairs[0, 0] + pairs[1, 1], pairs.total()
        f1 = 2 * pairs[1, 1] / max(1, 2 * pairs[1, 1] + pairs[0, 1] + pairs[1, 0])
        return {"accuracy": right / count, "f1": f1, "rows": count}


tokenizer: Any = Tokenizer()
make_model: Any = Classifier
get_linear_schedule_with_warmup: Any = linear_schedule

if os.environ.get("EXAMPLE_PARTS") == "transformers":
    from tokenizers import Tokenizer as Rust
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
    from transformers import get_linear_schedule_with_warmup as get_linear_schedule_with_warmup

    words = Rust(WordLevel({**Tokenizer.vocabulary, "[UNK]": 26}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # its masks are each rank's own

    def make_model() -> nn.Module:
        model = BertForSequenceClassification(BertConfig(vocab_size=27, **sizes, **dropout))
        for name, parameter in model.named_parameters():
            # Attention is the same for each value of it: its gradient is rounding errors, which Adam would scale up.
            parameter.requires_grad_(not name.endswith("key.bias"))
        return model
