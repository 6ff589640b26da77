package report

import (
	"bytes"
	"errors"
	"fmt"
	"image/color"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Chart is a picture: bars if it has labels, one group for each label; else curves.
type Chart struct {
	Name       string // of the file
	Title      string
	X, Y       string   // what the axes show
	Labels     []string // of the groups of bars
	Series     []Series
	LogX, LogY bool // of curves
}

// Series is what belongs together in a chart: a curve, or the bars of one colour. Bars have no X.
type Series struct {
	Name string
	X, Y []float64
}

// Add appends a point.
func (s *Series) Add(x, y float64) { s.X, s.Y = append(s.X, x), append(s.Y, y) }

// The colours can be told apart by those who don't see red and green, too (Okabe and Ito).
var colours = []color.Color{
	color.RGBA{0, 114, 178, 255},
	color.RGBA{230, 159, 0, 255},
	color.RGBA{0, 158, 115, 255},
	color.RGBA{213, 94, 0, 255},
	color.RGBA{204, 121, 167, 255},
	color.RGBA{86, 180, 233, 255},
	color.RGBA{90, 90, 90, 255},
}

const (
	width    = 20 * vg.Centimeter
	height   = 10 * vg.Centimeter
	barWidth = 14
)

// SVG draws the chart on white.
func (c Chart) SVG() ([]byte, error) {
	p, err := c.plot()
	if err != nil {
		return nil, err
	}
	canvas := vgsvg.New(width, height)
	c.draw(p, draw.New(canvas))
	var b bytes.Buffer
	_, err = canvas.WriteTo(&b)
	return b.Bytes(), err
}

func (c Chart) plot() (*plot.Plot, error) {
	if len(c.Series) == 0 {
		return nil, errors.New("nothing to draw")
	}
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = c.Title, c.X, c.Y
	p.Title.Padding = 8
	p.Legend.Top, p.Legend.Padding = true, 3
	p.Add(plotter.NewGrid())
	fill := c.curves
	if len(c.Labels) > 0 {
		fill = c.bars
	}
	return p, fill(p)
}

// draw keeps the legend out of the plot: the curves of a good lock are where a legend would be, whichever corner it is.
func (c Chart) draw(p *plot.Plot, dc draw.Canvas) {
	dc.SetColor(color.White)
	dc.Fill(dc.Rectangle.Path())
	legend := p.Legend
	p.Legend = plot.NewLegend()
	aside := vg.Length(0)
	if len(c.Series) > 1 {
		aside = legend.Rectangle(dc).Size().X + 10
	}
	p.Draw(draw.Crop(dc, 5, -aside-10, 5, -5))
	if aside > 0 {
		legend.Draw(draw.Crop(dc, 0, -5, 0, -30))
	}
}

func (c Chart) bars(p *plot.Plot) error {
	p.Y.Min = 0
	for i, s := range c.Series {
		bars, err := plotter.NewBarChart(plotter.Values(s.Y), barWidth)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		bars.Color, bars.LineStyle.Width = colours[i%len(colours)], 0
		bars.Offset = vg.Length(float64(i)-float64(len(c.Series)-1)/2) * barWidth
		p.Add(bars)
		if len(c.Series) > 1 {
			p.Legend.Add(s.Name, bars)
		}
	}
	names := make([]string, len(c.Labels))
	for i, label := range c.Labels {
		names[i] = strings.ReplaceAll(label, "`", "")
	}
	p.NominalX(names...)
	p.X.Min, p.X.Max, p.Y.Max = -0.5, float64(len(names))-0.5, 1.05*p.Y.Max
	p.X.Tick.Label.Rotation = math.Pi / 9 // so that long names don't run into each other
	p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = text.XRight, text.YCenter
	return nil
}

func (c Chart) curves(p *plot.Plot) error {
	if c.LogX {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	if c.LogY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	} else {
		p.Y.Min = 0
	}
	for i, s := range c.Series {
		line, points, err := plotter.NewLinePoints(s.points())
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		line.Color, line.Width = colours[i%len(colours)], 1.5
		points.Color, points.Shape = colours[i%len(colours)], draw.CircleGlyph{}
		p.Add(line, points)
		p.Legend.Add(s.Name, line, points)
	}
	return nil
}

func (s Series) points() plotter.XYs {
	var xys plotter.XYs
	for i := range s.X {
		xys = append(xys, plotter.XY{X: s.X[i], Y: s.Y[i]})
	}
	return xys
}
