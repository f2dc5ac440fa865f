class OmegaConf:
    create = dict
