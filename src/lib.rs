pub mod count;
pub mod rule;
