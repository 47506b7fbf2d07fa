"""trl: a small GPT-2 by the SFTTrainer, without dropout."""

import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
words = {f"w{number}": number for number in range(50)} | {"<eos>": 50, "<pad>": 51, "<unk>": 52}
splitter = Tokenizer(models.WordLevel(words, "<unk>"))
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
texts = [" ".join(f"w{(row * place) % 50}" for place in range(1, 12)) for row in range(64)]
shape = {"vocab_size": 53, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
arguments = SFTConfig(
    "out",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    num_train_epochs=2,
    logging_steps=4,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    max_length=32,
    bf16=False,
    gradient_checkpointing=False,
)
trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
loss = trainer.train().training_loss
if arguments.process_index == 0:
    print("loss", loss, float(sum(each.detach().double().sum() for each in model.parameters())), arguments.world_size)
