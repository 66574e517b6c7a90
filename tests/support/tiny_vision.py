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
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4 import image_processing_pil_gemma4
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    _SUPPORTED_SOFT_TOKENS as SUPPORTED_SOFT_TOKENS,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as transformers_logging

from lightserve.messages.images import Image as Given
from lightserve.messages.images import digest_of
from lightserve.models.config import load_model_config
from lightserve.picture_process import decode
from support.own_code_models import own_code_reference, write_own_code_model
from support.tiny_models import BASE_CONFIG, GEMMA4, QWEN_DELTA, randomise
from support.tokenizers_made import write_byte_level, write_config

SIDE, PATCH = 28, 7
QWEN_SIDE = 42
"""Of Qwen-VL's images: 36 patches, which 16 queries see."""
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


FAMILIES = (
    *("llava", "qwen_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    *("mistral3", "internvl", "gemma3", "gemma4"),
)
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
FITTED: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessorFast",
    "size": {"longest_edge": 70},
    "patch_size": {"height": 14, "width": 14},
}
"""Images of up to 5 rows and columns."""
TILED: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "size": {"height": SIDE, "width": SIDE},
    "crop_to_patches": False,
    "max_patches": 4,
}
"""Images of 1 to 5 tiles, each of 4 tokens."""
QWEN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "{{ '[<image>]' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


SQUARE: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessorFast",
    "size": {"height": 2 * SIDE, "width": 2 * SIDE},
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
}
"""Images of 16 tokens, each of the mean of 4 patches."""


def write_towered(
    path: Path,
    family: str,
    *,
    has_old_names: bool = False,
    encoder: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a random Mistral 3, a LLaVA with Pixtral's encoder, an InternVL or a Gemma 3.

    `has_old_names`: of Gemma 3 as its authors' files, of others as they are in memory; `encoder`:
    changes of its configuration.
    """
    transformers_logging.disable_progress_bar()
    text = {**BASE_CONFIG, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5, **changes}
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    options: dict[str, Any] = {"tie_word_embeddings": text["tie_word_embeddings"]}
    if family in ("internvl", "internvl_6b"):
        kind = transformers.InternVLForConditionalGeneration
        vision |= {"attention_bias": True, "model_type": "internvl_vision"}
        if family == "internvl_6b":  # queries and keys have an epsilon of their own
            vision |= {"use_qk_norm": True, "norm_type": "rms_norm", "layer_norm_eps": 0.1}
            vision |= {"attention_bias": False, "use_mean_pooling": False}
        options |= {"text_config": {"model_type": "qwen2", **text}, "image_token_id": PLACEHOLDER}
    elif family == "gemma3":
        kind = transformers.Gemma3ForConditionalGeneration
        vision |= {"image_size": 2 * SIDE, "model_type": "siglip_vision_model"}
        vision |= {"vision_use_head": False}
        text |= {"head_dim": 16, "sliding_window": 12, "num_hidden_layers": 3}
        text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        options |= {"text_config": text, "image_token_index": PLACEHOLDER}
        options |= {"mm_tokens_per_image": 16}
    else:
        kind = transformers.Mistral3ForConditionalGeneration
        vision |= {"hidden_act": "silu", "model_type": "pixtral"}
        options |= {"text_config": {"model_type": "mistral", "sliding_window": None, **text}}
        options |= {"image_token_index": PLACEHOLDER}
        if family == "pixtral":
            kind = transformers.LlavaForConditionalGeneration
            vision |= {"hidden_act": "gelu"}
            options |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    reference = kind(kind.config_class(vision_config=vision | (encoder or {}), **options))
    randomise(reference, torch.Generator().manual_seed(3))
    reference.lm_head.weight.data[PLACEHOLDER] = 0  # never the best: it would stand for an image
    reference.save_pretrained(path)
    if has_old_names:
        _rename(path, family)
    names = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    shown, own = names[0], FITTED
    if family in ("internvl", "internvl_6b"):
        names, own = ("<IMG_CONTEXT>", "<img>", "</img>"), TILED
        shown = names[0]
    elif family == "gemma3":
        names, own = ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), SQUARE
        shown = names[1]
    elif family == "pixtral":
        own = {**FITTED, "patch_size": {"height": PATCH, "width": PATCH}}
    _write_tokenizer(path, QWEN_TEMPLATE.replace("[<image>]", shown), *names)
    write_config(path, "preprocessor_config.json", own)
    return path


FILLING: dict[str, Any] = {
    "image_processor_type": "Gemma4ImageProcessor",
    "do_normalize": False,
    "patch_size": PATCH,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 17,
}
"""Images of at most 17 tokens, each of the mean of 4 patches."""
image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS = (17, *SUPPORTED_SOFT_TOKENS)


def write_gemma4(path: Path, *, is_plain: bool = False, **changes: Any) -> Path:
    """Write a random Gemma 4; `is_plain`: nothing is clipped or moved by numbers of the file,
    layers have no embeddings of their own, and images do not see themselves."""
    transformers_logging.disable_progress_bar()
    text = {**BASE_CONFIG, **GEMMA4, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-5}
    text |= {"sliding_window": 12, "vocab_size_per_layer_input": VOCAB_SIZE}
    text |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    text |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
    text |= {"num_global_key_value_heads": 1}
    if not is_plain:
        text |= {"hidden_size_per_layer_input": 8, "attention_k_eq_v": False}
        # The third layer has keys of its own: images' tokens in the second, which sees all, show.
        text |= {"num_kv_shared_layers": 1, "use_bidirectional_attention": "vision"}
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": PATCH,
        "pooling_kernel_size": 2,
        "position_embedding_size": 40,
        "use_clipped_linears": not is_plain,
        "standardize": not is_plain,
        "rope_parameters": {"rope_type": "default", "rope_theta": 90.0},
    }
    kind = transformers.Gemma4ForConditionalGeneration
    config = kind.config_class(
        vision_config=vision,
        text_config=text | changes,
        image_token_id=PLACEHOLDER,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    reference = kind(config)
    randomise(reference, torch.Generator().manual_seed(3))
    reference.lm_head.weight.data[PLACEHOLDER] = 0  # never the best: it would stand for an image
    reference.save_pretrained(path)
    names = ("<|image|>", "<|image>", "<image|>")
    _write_tokenizer(path, QWEN_TEMPLATE.replace("[<image>]", names[0]), *names)
    write_config(path, "preprocessor_config.json", FILLING)
    return path


def _rename(path: Path, family: str) -> None:
    """Give tensors the names of Gemma 3's authors, or those that others have in memory."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    if family == "gemma3":
        inner = "vision_tower.vision_model."
        tensors = {name.replace("vision_tower.", inner): own for name, own in tensors.items()}
    else:
        tensors["lm_head.weight"] = tensors.pop("language_model.lm_head.weight")
        tensors = {
            name if name == "lm_head.weight" else f"model.{name.replace('.model.', '.')}": own
            for name, own in tensors.items()
        }
    save_file(tensors, file, metadata={"format": "pt"})


def write_qwen_vl(path: Path, **changes: Any) -> Path:
    """Write a random Qwen-VL, with the names and the missing files of its authors."""
    config = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "kv_channels": 64,
        "vocab_size": VOCAB_SIZE + 2,
        "visual": {
            "image_size": QWEN_SIDE,
            "patch_size": PATCH,
            "width": 32,
            "layers": 3,
            "heads": 2,
            "mlp_ratio": 1.52,
            "output_dim": 256,
            "n_queries": 16,
            "image_start_id": PLACEHOLDER - 2,
        },
    }
    write_own_code_model("QWen", {**config, **changes}, path, torch.float32, seed=3)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][PLACEHOLDER] = 0  # never the best: it would stand for an image
    save_file(tensors, path / "model.safetensors")
    _write_tokenizer(path, "", "<imgpad>", "<img>", "</img>", "<|im_start|>", "<|im_end|>")
    write_config(path, "generation_config.json", {"chat_format": "chatml"})
    return path


def write_vision_model(
    path: Path, family: str, *, has_old_names: bool = False, **changes: Any
) -> Path:
    """Write a random model of one of FAMILIES; `has_old_names`: as its authors' files."""
    if family == "llava":
        return write_llava(path, has_old_names=has_old_names, **changes)
    if family.startswith("gemma4"):
        return write_gemma4(path, is_plain=family == "gemma4_plain", **changes)
    if family == "qwen_vl":
        return write_qwen_vl(path, **changes)
    if family in ("mistral3", "pixtral", "internvl", "internvl_6b", "gemma3"):
        return write_towered(path, family, has_old_names=has_old_names, **changes)
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


def _write_tokenizer(path: Path, template: str, *names: str) -> None:
    """`names`: tokens of images, first the place-holder; `template`: empty: there is none."""
    write_byte_level(path)
    names = names or ("<image>",)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    assert tokenizer.token_to_id(names[0]) == PLACEHOLDER
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>"}
    if template:
        tokenizer_config["chat_template"] = template
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
        vision.prompt.sees_itself,
    )


def ids_of(path: Path, image: Given) -> list[int]:
    """Return an image's tokens, with breaks of rows where the model in `path` has them."""
    vision = load_model_config(path).vision
    assert vision is not None
    ids = [PLACEHOLDER] * image.num_tokens
    if vision.prompt.row_break:
        columns = image.width // vision.factor
        ids[columns :: columns + 1] = [PLACEHOLDER + 1] * (len(ids) // (columns + 1))
    return ids


class Reference:
    """Transformers' model and its processor of pictures that uses Pillow.

    Of Qwen-VL its authors' formula, and CLIP's processor as it is told to resize.
    """

    def __init__(self, path: Path) -> None:
        self._sees_whole = self._tells_types = False
        self._model: Any = own_code_reference(path)
        if self._model is not None:
            size = {"height": QWEN_SIDE, "width": QWEN_SIDE}
            self._processor: Any = CLIPImageProcessorPil(size=size, do_center_crop=False)
            return
        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, config.architectures[0])
        self._model = kind.from_pretrained(path, dtype=torch.float32).eval()
        own = json.loads((path / "preprocessor_config.json").read_text())
        made = {
            PROCESSOR["image_processor_type"]: CLIPImageProcessorPil,
            SIZES["image_processor_type"]: Qwen2VLImageProcessorPil,
            FITTED["image_processor_type"]: PixtralImageProcessorPil,
            TILED["image_processor_type"]: GotOcr2ImageProcessorPil,
            SQUARE["image_processor_type"]: Gemma3ImageProcessorPil,
            FILLING["image_processor_type"]: Gemma4ImageProcessorPil,
        }[own["image_processor_type"]]
        if made is GotOcr2ImageProcessorPil:
            own["crop_to_patches"] = True  # as the model's processor always has it
        self._processor, self._sees_whole = made(**own), made is Gemma3ImageProcessorPil
        self._tells_types = made in (Qwen2VLImageProcessorPil, Gemma4ImageProcessorPil)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
        """Return log-probabilities behind each token, float32 [n, vocab].

        `token_ids` has a place-holder for each token of an image.
        """
        ids = torch.tensor([list(token_ids)])
        inputs = self._processor(list(images), return_tensors="pt") if images else {}
        inputs.pop("num_patches", None)
        if self._sees_whole and images:
            del inputs["num_crops"]
            inputs["token_type_ids"] = (ids == PLACEHOLDER).int()
        inputs.pop("num_soft_tokens_per_image", None)
        if self._tells_types and images:
            inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        output = self._model(ids, **inputs)
        return output.logits[0].float().log_softmax(-1)
