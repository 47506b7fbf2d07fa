"""sentence-transformers: a small BERT by its trainer, on pairs of sentences and how alike they are."""

import os

import torch
from datasets import Dataset
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

torch.manual_seed(0)
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
words = {"[PAD]": 0, "[UNK]": 1} | {f"w{number}": number + 2 for number in range(50)}
splitter = Tokenizer(models.WordLevel(words, "[UNK]"))
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
shape = {"vocab_size": 52, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
folder = f"bert-{rank}"
config = BertConfig(**shape, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
config.save_pretrained(folder)
save_file(BertModel(config).state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
encoder = Transformer(folder, max_seq_length=16)
model = SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")


def sentence(first, stride):
    return " ".join(f"w{(first + stride * place) % 50}" for place in range(6))


rows = Dataset.from_dict(
    {
        "sentence1": [sentence(number, 1) for number in range(64)],
        "sentence2": [sentence(number, 1 + number % 3) for number in range(64)],
        "score": [1 - number % 3 / 2 for number in range(64)],
    }
)
arguments = SentenceTransformerTrainingArguments(
    "out",
    per_device_train_batch_size=8 // ranks,
    num_train_epochs=2,
    logging_steps=4,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=CosineSimilarityLoss(model))
loss = trainer.train().training_loss
if rank == 0:
    print("loss", loss, float(sum(each.detach().double().sum() for each in model.parameters())), ranks)
