"""The tags of metrics."""

from composer3d.facts.tags import tag_of


def test_every_metric_has_a_tag() -> None:
    assert tag_of("loss").name == "loss/train"
    assert "this part of the model" in tag_of("grad_norm/head").description
    assert tag_of("expert_load/blocks.3") == ("expert_load/blocks.3", "")
    assert tag_of("new") == ("other/new", "")


def test_a_description_says_whose_a_value_is_and_all_that_it_counts() -> None:
    assert "rank 0" in tag_of("data_s").description
    assert "going back" in tag_of("checkpoint_s").description
    assert "multi-token" in tag_of("grad_norm/other").description
    assert "per valid token" in tag_of("validation_loss").description
