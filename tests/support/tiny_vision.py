"""Random small models that see images, with all files of a server, and pictures for them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.utils import logging as transformers_logging

from lightserve.messages.images import Image as Given
from lightserve.messages.images import digest_of
from lightserve.models.config import load_model_config
from lightserve.picture_process import decode
from support.tiny_models import BASE_CONFIG, randomise
from support.tokenizers_made import write_byte_level, write_config

SIDE, PATCH = 28, 7
NUM_TOKENS = (SIDE // PATCH) ** 2
PLACEHOLDER = 259
VOCAB_SIZE = 262
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
    "{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ c['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As LLaVA-1.5's: images first, and contents that are lists."""


def write_llava(
    path: Path, *, dtype: torch.dtype = torch.float32, has_old_names: bool = False, **changes: Any
) -> Path:
    """Write a random LLaVA-1.5; `has_old_names`: as its authors' files in transformers' format."""
    transformers_logging.disable_progress_bar()
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=32,
    )
    text = transformers.LlamaConfig(
        **{**BASE_CONFIG, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5, **changes}
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=PLACEHOLDER
    )
    reference = transformers.LlavaForConditionalGeneration(config)
    randomise(reference, torch.Generator().manual_seed(3))
    reference.to(dtype).save_pretrained(path)
    if has_old_names:
        file = path / "model.safetensors"
        tensors = load_file(file)
        renamed = {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, file, metadata={"format": "pt"})
    write_byte_level(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    assert tokenizer.token_to_id("<image>") == PLACEHOLDER
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    write_config(path, "tokenizer_config.json", tokenizer_config)
    write_config(path, "preprocessor_config.json", PROCESSOR)
    return path


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Return a picture of coloured noise in large spots."""
    rng = np.random.default_rng(seed)
    spots = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return spots.resize((width, height), Image.Resampling.BICUBIC)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture's file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Return a file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def given_image(path: Path, image: Image.Image, start: int) -> Given:
    """Return a picture as messages have it, for the model in `path`."""
    vision = load_model_config(path).vision
    assert vision is not None
    made = decode(file_of(image), vision.processor)
    assert not made.complaint
    digest = digest_of(made.height, made.width, made.pixels)
    return Given(start, vision.num_tokens, made.height, made.width, made.pixels, digest)


class Reference:
    """Transformers' model and its processor of pictures that uses Pillow."""

    def __init__(self, path: Path) -> None:
        self._model = transformers.LlavaForConditionalGeneration.from_pretrained(
            path, dtype=torch.float32
        ).eval()
        own = json.loads((path / "preprocessor_config.json").read_text())
        self._processor = CLIPImageProcessorPil(**own)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
        """Return log-probabilities behind each token, float32 [n, vocab].

        `token_ids` has a place-holder for each token of an image.
        """
        pixels = None
        if images:
            pixels = self._processor(list(images), return_tensors="pt")["pixel_values"]
        output = self._model(input_ids=torch.tensor([list(token_ids)]), pixel_values=pixels)
        return output.logits[0].float().log_softmax(-1)
