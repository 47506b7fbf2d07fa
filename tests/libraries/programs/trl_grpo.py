"""trl: a small GPT-2 by the GRPOTrainer; each rank draws completions, and rewards are compared across the ranks."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
words = {f"w{number}": number for number in range(50)} | {"<eos>": 50, "<pad>": 51, "<unk>": 52}
splitter = Tokenizer(models.WordLevel(words, "<unk>"))
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=splitter, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
)
prompts = [" ".join(f"w{(row * place) % 50}" for place in range(1, 6)) for row in range(16)]
shape = {"vocab_size": 53, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**shape, eos_token_id=50, bos_token_id=50, pad_token_id=51))


def count_small(completions, **_):
    return [sum(int(word[1:]) < 25 for word in each.split() if word[1:].isdigit()) / 8 for each in completions]


arguments = GRPOConfig(
    "out",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    max_steps=4,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
    learning_rate=1e-3,
)
trainer = GRPOTrainer(
    model,
    count_small,
    args=arguments,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=tokenizer,
)
loss = trainer.train().training_loss
rewards = [each["reward"] for each in trainer.state.log_history if "reward" in each]
if arguments.process_index == 0:
    weights = float(sum(each.detach().double().sum() for each in model.parameters()))
    print("loss", loss, weights, arguments.world_size, rewards)
