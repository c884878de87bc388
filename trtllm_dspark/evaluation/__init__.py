"""How well drafts are accepted: the texts that it is measured on."""
