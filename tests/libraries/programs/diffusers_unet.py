"""diffusers: a small UNet2DModel in the loop of its train_unconditional.py, by Accelerate.

The noise comes with the images: drawn in the loop, it would depend on the number of ranks.
"""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=8,
)
ema_model = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
images, noises = torch.randn(2, 32, 1, 8, 8).unbind()
timesteps = torch.randint(100, (32,))
dataset = torch.utils.data.TensorDataset(images, noises, timesteps)
loader = torch.utils.data.DataLoader(dataset, batch_size=8 // accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=2 * len(loader))
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
for _ in range(2):
    model.train()
    for clean, noise, steps in loader:
        noisy = noise_scheduler.add_noise(clean, noise, steps)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(noisy, steps).sample, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
mean = float(accelerator.gather(loss.detach().reshape(1)).mean())
trained = accelerator.unwrap_model(model)
ema_model.copy_to(trained.parameters())
if accelerator.is_main_process:
    weights = float(sum(each.detach().double().abs().sum() for each in trained.parameters()))
    print("loss", mean, weights, accelerator.num_processes)
accelerator.end_training()
