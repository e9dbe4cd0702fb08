kvsim replay sample --policy streaming_llm,h2o,tova,snapkv,ams+tova --set window=8 --set min_segment=8 --budget 64,128 --interval 32 --set prefill=true --out runs/five
kvsim plot over_budgets runs/five --out figures/over_budgets.png
kvsim plot pareto runs/five --out figures/pareto.png
kvsim plot ranking runs/five --out figures/ranking.png
kvsim plot sparsity_curves runs/five --policy tova,ams+tova --budget 128 --out figures/sparsity_curves.png
kvsim plot retention_map sample --policy streaming_llm,h2o,tova --budget 64 --interval 32 --layer 1 --head 1 --out figures/retention_map.png
kvsim plot bursts sample --policy streaming_llm,h2o,tova,snapkv,ams+tova --set window=8 --set min_segment=8 --budget 64 --interval 32 --set prefill=true --layer 1 --head 1 --out figures/bursts.png
kvsim plot middle_coverage sample --policy random,h2o,tova,snapkv,ams+tova --set window=8 --set min_segment=8 --budget 64,128 --interval 32 --set prefill=true --out figures/middle_coverage.png
kvsim plot position_density sample --policy random,h2o,tova,ams+tova --set window=8 --set min_segment=8 --budget 64,128 --interval 32 --set prefill=true --out figures/position_density.png
kvsim plot mass_curve sample --policy ams+tova --set window=8 --set min_segment=8 --set recent=8 --set segment_mass=0.05 --budget 128 --interval 64 --set prefill=false --layer 1 --out figures/mass_curve.png
kvsim plot token_text sample --policy gkv --budget 128 --interval 64 --out figures/token_text.png
kvsim replay sample --policy snapkv --budget 64 --interval 32 --judge --metric response_kl_tokens --out runs/kl
kvsim plot kl_text sample runs/kl --out figures/kl_text.png
kvsim plot overlap_curves sample --out figures/overlap_curves.png
kvsim plot reconstruction_error sample --policy expected_attention,snapkv,knorm,random --out figures/reconstruction_error.png
kvsim plot expected_observed sample --layer 2 --out figures/expected_observed.png
