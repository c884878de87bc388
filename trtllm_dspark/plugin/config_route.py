"""How the host reads the `config.json` of a draft whose `model_type` its transformers does not know.

transformers' own registry is asked by the host where its list has no such type. Gaps are filled, nothing is replaced.
"""

MODEL_TYPE = "k3_dspark"


def register() -> None:
    """Make `AutoConfig` read `model_type: k3_dspark`, unless it does already."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if MODEL_TYPE in CONFIG_MAPPING:
        return
    kind = type("K3DSparkConfig", (PretrainedConfig,), {"model_type": MODEL_TYPE, "__module__": __name__})
    AutoConfig.register(MODEL_TYPE, kind)
