"""Between ranks: the live channel, the merge of journals, the evidence."""
