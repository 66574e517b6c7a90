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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as transformers_logging

from lightserve.messages.images import Image as Given
from lightserve.messages.images import digest_of
from lightserve.models.config import load_model_config
from lightserve.picture_process import decode
from support.tiny_models import BASE_CONFIG, QWEN_DELTA, randomise
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
    reference.lm_head.weight.data[PLACEHOLDER] = 0  # never the best: it would stand for an image
    reference.to(dtype).save_pretrained(path)
    if has_old_names:
        file = path / "model.safetensors"
        tensors = load_file(file)
        renamed = {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, file, metadata={"format": "pt"})
    _write_tokenizer(path, TEMPLATE)
    write_config(path, "preprocessor_config.json", PROCESSOR)
    return path


FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIZES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 14 * 14,
    "max_pixels": 14 * 14 * 20,
    "patch_size": 7,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.3, 0.2, 0.5],
}
"""Images of 1 to 20 tokens, each of 14 x 14 pixels."""
QWEN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "{{ '[<image>]' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def write_vision_model(
    path: Path, family: str, *, has_old_names: bool = False, **changes: Any
) -> Path:
    """Write a random model of one of FAMILIES; `has_old_names`: as its authors' files."""
    if family == "llava":
        return write_llava(path, has_old_names=has_old_names, **changes)
    transformers_logging.disable_progress_bar()
    vision: dict[str, Any] = {
        "depth": 3,
        "num_heads": 2,
        "patch_size": 7,
        "hidden_size": 32,
        "out_hidden_size": BASE_CONFIG["hidden_size"],
        "intermediate_size": 48,
    }
    text = {**BASE_CONFIG, "vocab_size": VOCAB_SIZE, **changes}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    match family:
        case "qwen2_vl":
            kind = transformers.Qwen2VLForConditionalGeneration
            vision |= {"embed_dim": 32, "hidden_size": BASE_CONFIG["hidden_size"]}
        case "qwen2_5_vl":
            kind = transformers.Qwen2_5_VLForConditionalGeneration
            vision |= {"window_size": 28, "fullatt_block_indexes": [1]}
        case "qwen3_5":
            kind = transformers.Qwen3_5ForConditionalGeneration
            vision |= {"num_position_embeddings": 25}
            text |= {**QWEN_DELTA, "head_dim": 32, "num_hidden_layers": 4}
            rope |= {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
        case _:
            kind = transformers.Qwen3VLForConditionalGeneration
            vision |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
            text |= {"head_dim": 16, "num_hidden_layers": 3}
            rope |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    config = kind.config_class(
        vision_config=vision,
        text_config=text | {"rope_parameters": rope},
        image_token_id=PLACEHOLDER,
        video_token_id=VOCAB_SIZE - 1,
        vision_start_token_id=0,
    )
    reference = kind(config)
    randomise(reference, torch.Generator().manual_seed(3))
    reference.lm_head.weight.data[PLACEHOLDER] = 0  # never the best: it would stand for an image
    reference.save_pretrained(path)
    if has_old_names:
        file = path / "model.safetensors"
        renamed = {
            name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): own
            for name, own in load_file(file).items()
        }
        save_file(renamed, file, metadata={"format": "pt"})
    _write_tokenizer(path, QWEN_TEMPLATE)
    write_config(path, "preprocessor_config.json", SIZES)
    return path


def _write_tokenizer(path: Path, template: str) -> None:
    write_byte_level(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    assert tokenizer.token_to_id("<image>") == PLACEHOLDER
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    write_config(path, "tokenizer_config.json", tokenizer_config)


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
    return Given(
        start,
        vision.num_tokens(made.height, made.width),
        made.height,
        made.width,
        made.pixels,
        digest,
    )


class Reference:
    """Transformers' model and its processor of pictures that uses Pillow."""

    def __init__(self, path: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, config.architectures[0])
        self._model = kind.from_pretrained(path, dtype=torch.float32).eval()
        own = json.loads((path / "preprocessor_config.json").read_text())
        is_llava = own["image_processor_type"] == PROCESSOR["image_processor_type"]
        made = CLIPImageProcessorPil if is_llava else Qwen2VLImageProcessorPil
        self._processor = made(**own)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
        """Return log-probabilities behind each token, float32 [n, vocab].

        `token_ids` has a place-holder for each token of an image.
        """
        ids = torch.tensor([list(token_ids)])
        inputs = self._processor(list(images), return_tensors="pt") if images else {}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        output = self._model(input_ids=ids, **inputs)
        return output.logits[0].float().log_softmax(-1)
