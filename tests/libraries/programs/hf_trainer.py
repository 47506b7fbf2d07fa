"""transformers: a small GPT-2 by the Trainer, without dropout."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randint(50, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


torch.manual_seed(0)
shape = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    num_train_epochs=2,
    logging_steps=4,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    seed=0,
)
loss = Trainer(model, arguments, train_dataset=Rows()).train().training_loss
if arguments.process_index == 0:
    print("loss", loss, float(sum(each.detach().double().sum() for each in model.parameters())), arguments.world_size)
