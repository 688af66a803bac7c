"""The packed layout and the sparse training pass agree with diffusers' code."""

import torch
import torch.nn.functional as F
from diffusers import FluxFillPipeline

from tools.train_embedded.layout import IMAGE_TOKENS, TEXT_TOKENS, image_ids, pack, pack_mask, unpack
from tools.train_embedded.models import TEXT_WIDTH, build_transformer
from tools.train_embedded.sparse import attend, choose_tokens, make_sparse


def test_packing_is_the_pipelines() -> None:
    latents = torch.randn(2, 16, 32, 32)
    assert pack(latents).equal(FluxFillPipeline._pack_latents(latents, 2, 16, 32, 32))
    assert unpack(pack(latents)).equal(latents)
    assert image_ids().equal(FluxFillPipeline._prepare_latent_image_ids(1, 16, 16, "cpu", torch.float32))


def test_a_mask_token_holds_its_own_pixels() -> None:
    mask = torch.zeros(1, 256, 256)
    mask[:, 32:48, 16:32] = 1  # row 2, column 1
    packed = pack_mask(mask)[0]
    assert packed[2 * 16 + 1].eq(1).all()
    assert packed.sum() == 256


def test_masked_tokens_are_chosen_first() -> None:
    torch.manual_seed(0)
    masked = torch.zeros(3, IMAGE_TOKENS)
    masked[:, 100:120] = 1
    chosen = choose_tokens(masked, 96)
    assert all(len(set(row.tolist())) == 96 for row in chosen)
    assert masked.gather(1, chosen).sum(1).ge(19).all()


def test_the_sparse_pass_over_all_tokens_is_the_stock_pass() -> None:
    torch.manual_seed(0)
    transformer = build_transformer().eval()
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    inputs = {
        "hidden_states": torch.randn(1, IMAGE_TOKENS, 384), "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 128),
        "pooled_projections": torch.randn(1, TEXT_WIDTH), "timestep": torch.tensor([0.5]), "img_ids": image_ids(),
        "txt_ids": torch.zeros(TEXT_TOKENS, 3), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        stock = transformer(**inputs)[0]
        positions = make_sparse(transformer)
        positions.select(torch.arange(IMAGE_TOKENS)[None])
        sparse = transformer(**inputs)[0]
    assert (stock - sparse).norm() < 0.02 * stock.norm()  # the rotary tables are bf16 in training


def test_written_out_attention_is_pytorchs_in_its_gradients_too() -> None:
    torch.manual_seed(0)
    query, key, value = inputs = torch.randn(3, 2, 3, 10, 16, requires_grad=True).unbind()
    own, stock = attend(query, key, value), F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(own, stock)
    weights = torch.randn_like(own)
    for ours, theirs in zip(
        torch.autograd.grad((own * weights).sum(), inputs),
        torch.autograd.grad((stock * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
