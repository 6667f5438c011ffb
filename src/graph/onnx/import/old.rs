//! Nodes of opsets 1 to 6, in the form that they have had since opset 7.

use super::*;

/// The oldest version whose operators broadcast as they do today, and whose rows can [`upgrade`](OpDef::upgrade) the rest.
const MODERN: i64 = 7;
/// Attributes that chose buffers or told what the outputs of a node tell.
const NO_MEANING: [&str; 2] = ["consumed_inputs", "output_sequence"];

impl<'a> Importer<'a> {
    /// Changes the inputs and attributes of a node of an old opset to those of [`MODERN`].
    pub(super) fn modernize(
        &mut self,
        op: &OpDef,
        call: &Call<'_, 'a>,
        inputs: &mut [Option<ValueId>],
        attrs: &mut Attrs,
    ) -> Result<()> {
        if call.scope.opset >= MODERN || !domain(&call.node.domain).is_empty() {
            return Ok(());
        }
        for name in NO_MEANING {
            attrs.remove(name);
        }
        let number = |attrs: &mut Attrs, name: &str, default: i64| match attrs.remove(name) {
            None => Ok(default),
            Some(Attr::Int(value)) => Ok(value),
            Some(_) => Err(call.fail(format!("attribute '{name}': expected an integer"))),
        };
        match op.name {
            "Add" | "Sub" | "Mul" | "Div" | "Pow" | "And" | "Or" | "Xor" | "Equal" | "Less" | "Greater" => {
                let spreads = number(attrs, "broadcast", 0)? != 0;
                let axis = attrs.get("axis").is_some().then(|| number(attrs, "axis", 0)).transpose()?;
                if let (true, Some(axis)) = (spreads, axis) {
                    self.begin_at(call, inputs, axis)?;
                }
            }
            // One slope per channel.
            "PRelu" => {
                let &mut [Some(x), Some(slopes)] = inputs else { return Ok(()) };
                self.notes.rely(Relied::Shape(slopes));
                self.notes.rely(Relied::Rank(x));
                let [x, slopes] = [x, slopes].map(|value| &self.graph.fact(value).shape);
                if x.len() > 1 && slopes.len() == 1 && slopes.numel() > 1 {
                    self.begin_at(call, inputs, 1)?;
                }
            }
            "Gemm" => _ = number(attrs, "broadcast", 0)?,
            "BatchNormalization" | "Dropout" => {
                ensure(number(attrs, "is_test", 0)? != 0, || {
                    call.fail("attribute 'is_test': expected 1 (inference), found 0: export the model for inference")
                })?;
                ensure(number(attrs, "spatial", 1)? != 0, || {
                    call.fail("attribute 'spatial': expected 1 (a mean per channel), found 0")
                })?;
            }
            "Concat" if call.scope.opset < 4 && attrs.get("axis").is_none() => attrs.set("axis", 1),
            "Pad" => rename(attrs, "paddings", "pads"),
            "Cast" => {
                if let Some(Attr::Str(name)) = attrs.get("to") {
                    let to = DataType::from_name(&name.to_lowercase());
                    let to = to.ok_or_else(|| call.fail(format!("attribute 'to': expected a type, found '{name}'")))?;
                    attrs.set("to", i64::from(to as i32));
                }
            }
            "LpPool" | "GlobalLpPool" => {
                if let Some(&Attr::Float(p)) = attrs.get("p") {
                    ensure(p.fract() == 0.0, || {
                        call.fail(format!("attribute 'p': expected a whole number, found {p}"))
                    })?;
                    attrs.set("p", p as i64);
                }
            }
            "Upsample" if attrs.get("scales").is_none() => {
                if attrs.get("mode").is_some_and(|mode| matches!(mode, Attr::Str(mode) if mode == "bilinear")) {
                    attrs.set("mode", "linear");
                }
                let mut scale = |name| match attrs.remove(name) {
                    Some(Attr::Float(scale)) => Ok(scale),
                    _ => Err(call.fail(format!("attribute '{name}': expected a float"))),
                };
                let scales = vec![1.0, 1.0, scale("height_scale")?, scale("width_scale")?];
                attrs.set("scales", Attr::Floats(scales));
            }
            _ => {}
        }
        Ok(())
    }

    /// Lets the axes of the second input stand for those of the first from `axis` on, by axes of extent 1 behind them.
    fn begin_at(&mut self, call: &Call<'_, 'a>, inputs: &mut [Option<ValueId>], axis: i64) -> Result<()> {
        let &mut [Some(a), Some(b)] = inputs else { return Ok(()) };
        [a, b].into_iter().for_each(|value| self.notes.rely(Relied::Rank(value)));
        let [whole, part] = [a, b].map(|value| self.graph.fact(value).shape.len() as i64);
        let first = if axis < 0 { axis.saturating_add(whole) } else { axis };
        ensure((0..=whole - part).contains(&first), || {
            call.fail(format!("attribute 'axis': expected a place for {part} axes among {whole}, found {axis}"))
        })?;
        let axes: Vec<i64> = (part..whole - first).collect();
        if !axes.is_empty() {
            let attrs = Attrs::new().with("axes", axes);
            let name = format!("{}.axes", call.name);
            inputs[1] = Some(self.add(self.rows["Unsqueeze"], &name, &[Some(b)], attrs, &[])?[0]);
        }
        Ok(())
    }
}

fn rename(attrs: &mut Attrs, old: &str, new: &str) {
    if let Some(attr) = attrs.remove(old) {
        attrs.set(new, attr);
    }
}
