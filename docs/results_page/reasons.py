"""Why a claim has another verdict on SmolLM2 than on tiny, as far as the numbers show it."""

from __future__ import annotations

_ONE_BUDGET = (
    "Tested at 256 entries alone here. On `tiny`, where it has to hold at four budgets, they "
    "disagree."
)
_OLDER = (
    "What older windows attended to helps on `tiny` and not here: scores of the last window alone "
    "are as good or better. The differences here are small."
)
_SIZES = (
    "AMS has the paper's parameters here, on `tiny` a window of 16 and segments of 4 to 32 tokens."
)
_UNKNOWN = "The numbers show no reason."

_AGAIN = "Not decided before SmolLM2 is measured again: of its values the page has intervals alone."

#: By the number of the claim and its words.
REASONS: dict[tuple[str, str], str] = {
    ("Q5", "Credit makes segments move less from event to event"): _SIZES,
    ("Q6", "Quotas by mass are better than by length"): _ONE_BUDGET,
    ("Q7", "Segments by mass are better than fixed ones"): _ONE_BUDGET,
    ("Q8", "AMS is better than tova"): (
        "On `tiny` AMS leads by 0.011 at most. Here its window has all of 128 entries and half of "
        "256, and where it has less, at 512, AMS is behind too."
    ),
    ("Q8", "AMS is better than keydiff with sinks and recent entries kept"): (
        "Keeping sinks and recent entries mends all that AMS mends of KeyDiff on `tiny`, and a "
        "part of it here."
    ),
    ("Q8", "Sets per head alone, which AMS brings too, make tova better"): (
        "On `tiny` sets per head raise the output error by 0.3 and more, here they change nothing "
        f"that can be measured. {_UNKNOWN}"
    ),
    (
        "Q9",
        "Filling in the largest usage for the window's entries is better than what was observed",
    ): f"{_SIZES} Here the window has half of the entries.",
    ("Q12", "The length of the window hardly matters"): (
        "One window in question, 256, is as long as the budget here. On `tiny` all windows are "
        "shorter than the budgets."
    ),
    ("G4", "More than 90 % of the keys get less than 1 % of the largest score (all keys)"): (
        "Scores are less sparse here, layer 0 above all. Deep layers pass only by the scores of "
        "the sinks, which are the largest (the next line)."
    ),
    (
        "G4",
        "More than 90 % of the keys get less than 1 % of the largest score (without the first 4)",
    ): "Scores are less sparse here, in every layer.",
    ("G6", "The local score keeps later positions than the global one"): (
        "The two keep nearly the same places here; at the smallest budget the local ones are "
        "later, at the largest ones earlier."
    ),
    ("G6", "What the global score keeps is spread more evenly"): (
        "It is at the smallest budget, and not at larger ones."
    ),
    ("G8", "global_max keeps more of what is attended to later than morphkv@gkv"): _OLDER,
    ("G8", "... with a lower output error than morphkv@gkv"): _OLDER,
    ("G8", "gkv keeps more of what is attended to later than rkv"): _OLDER,
    ("G8", "... with a lower output error than rkv"): _OLDER,
    ("G9", "Fusion by maximum and by sum are alike"): (
        "They are within 5 %, on average, up to 512 entries; at 512 the interval reaches past "
        "that, and the prompts of 1,024 are too few."
    ),
    ("G9", "A decay of 0.8 is better than one of 0"): _OLDER,
    ("G9", "A decay of 0.8 is better than one of 0.5"): _OLDER,
    ("E3", "The covariance makes it better"): (
        f"It lowers the output error of `tiny` by 0.03, and hardly that of SmolLM2. {_UNKNOWN}"
    ),
    ("E4", "The norm of the value makes it better"): (
        f"{_ONE_BUDGET} It changes the output error by about 0.001 on both models."
    ),
    ("E5", "Budgets by head (AdaKV) make snapkv better"): _UNKNOWN,
    ("E6", "Expected Attention is better than keydiff"): _ONE_BUDGET,
    ("E6", "Expected Attention is better than tova"): (
        "Epsilon costs Expected Attention about as much here as it is behind TOVA (E4). On `tiny` "
        "it costs as much, and Expected Attention leads all the same."
    ),
    ("E6", "Expected Attention is better than streaming_llm"): _ONE_BUDGET,
    (
        "Q10",
        "The lead of AMS over tova grows as the budget falls (wipe-out of regions of 32)",
    ): _AGAIN,
    ("Q13", "What AMS adds is negligible beside the scoring"): _AGAIN,
    ("G5", "... and so it is with what is kept: more than 80 % get less than 5 %"): _AGAIN,
    (
        "G12",
        "Attention thins out as the text grows, so that scores have to be normalised",
    ): _AGAIN,
    ("S3", "With more tokens a threshold is passed later"): (
        "Ranks vary more in later layers than in the first one that ASL tests here, most of all "
        "with few tokens."
    ),
}
