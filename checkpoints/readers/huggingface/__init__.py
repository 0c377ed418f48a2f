"""Models in Hugging Face form: their configs and names as data, one key-table builder for all."""
